"""The page of an operator: everything that is known stands in it, and what is not says why."""

from __future__ import annotations

import base64
import hashlib
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import paged
import pytest
import torch
from html_reader import Reader

import opsmith
from opsmith import errors
from opsmith.benchmarking import Benchmark
from opsmith.benchmarking.result import BenchmarkCase, Ceiling, Contender, Timing, Work
from opsmith.checking import Outcome, Report
from opsmith.pages import content
from opsmith.pages.content import AbsentSection

pytestmark = pytest.mark.usefixtures("no_exports")

SECTIONS = (
    "check",
    "origins",
    "code",
    "graph",
    "memory",
    "kernels",
    "accesses",
    "benchmark",
    "onnx",
    "environment",
)


def measured(name: str) -> Benchmark:
    """A benchmark that took no time."""
    names = ("operator", "reference")
    timings = tuple(
        Timing(each, "forward", 1, (seconds, seconds))
        for each, seconds in zip(names, (1e-4, 4e-4), strict=True)
    )
    case = BenchmarkCase(
        "B=64",
        {"B": 64},
        ("x [64, 3]",),
        192,
        "float32",
        "cpu",
        "size",
        tuple(Contender(each, each, each) for each in names),
        timings,
        (Work("forward", 10_000, 50_000, "counted"),),
        (),
    )
    ceilings = (Ceiling("cpu", "copy", 1e9, bytes=10_000), Ceiling("cpu", "multiply", 1e10, dtype="float32"))
    return Benchmark(name, "quick", 0, 1, {"torch": "2", "processor": "some"}, {}, ceilings, (case,))


def written(folder: Path, operator: opsmith.Operator[..., Any], **options: Any) -> str:
    options = {"reports": {operator.name: paged.failed(operator)}, **options}
    (file,) = opsmith.page(operator, folder / "page.html", **options)
    return file.read_text(encoding="utf-8")


def section(text: str, name: str) -> str:
    """A section's own text."""
    start = text.index(f'<h2 id="{name}">')
    return text[
        start : text.index("</section>\n</main>" if name == SECTIONS[-1] else "</section>\n\n", start)
    ]


@pytest.fixture
def text(tmp_path: Path) -> str:
    return written(tmp_path, paged.affine, benchmarks={"paged::affine": measured("paged::affine")})


def test_every_section_is_there_and_can_be_reached(text: str) -> None:
    read = Reader(text)
    assert read.open == []
    ids = read.every("id")
    assert len(ids) == len(set(ids))
    links = [link for link in read.every("href") if link.startswith("#")]
    assert {link.removeprefix("#") for link in links} >= {*SECTIONS}
    assert {link.removeprefix("#") for link in links} <= {*ids}
    assert {each for value in read.every("aria-labelledby") for each in value.split()} <= {*ids}


@pytest.mark.slow
def test_it_asks_nobody_for_anything_and_lets_through_what_is_ours_alone(text: str) -> None:
    read = Reader(text)
    outside = [*read.every("src"), *read.every("href"), *read.every("xlink:href"), *read.every("action")]
    assert all(each.startswith("#") or each == "data:," for each in outside)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; style-src 'sha256-")
    for tag in ("style", "script"):
        parts = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert len(parts) >= 2
        for part in parts:
            digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in policy[1]
    assert " style=" not in text
    assert not re.search(r" on\w+=", text)


@pytest.mark.slow
def test_headings_skip_no_level(text: str) -> None:
    levels = [int(tag[1]) for tag, _ in Reader(text).attributes if re.fullmatch("h[1-6]", tag)]
    assert levels.count(1) == 1 == levels[0]
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_what_an_operator_says_becomes_no_markup(text: str) -> None:
    assert "<script>alert" not in text
    assert "scale (x Wt) + b, &lt;script&gt;alert(" in text


@pytest.mark.slow
def test_signature_and_arguments(text: str) -> None:
    words = Reader(text).text
    assert (
        "affine( x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scale: float = 1.0, ) -> Tensor"
    ) in words
    assert "x Tensor [B, M]" in words
    assert "bias Tensor | None [N] default None" in words
    assert "scale float default 1.0, by keyword" in words
    assert "y Tensor [B, N]" in words
    assert "paged::affine(Tensor x, Tensor weight, Tensor? bias=None, *, float scale=1.0) -> Tensor" in words


def test_the_check_is_a_matrix_with_its_failures_unfolded(text: str) -> None:
    check = section(text, "check")
    rows = re.findall(r"<tr class=.*?</tr>", check, re.DOTALL)
    cells = [re.findall(r'<td class="dtype (\w*)">', row) for row in rows if "why" not in row]
    assert cells == [["passed", "passed"], ["failed", "unclear"]]
    words = Reader(check).text
    assert "the gradient of weight is the transpose of the right tensor" in words
    assert "gradient of weight: transposed" in words
    assert "where operators.py:12 cause Two dimensions of the gradient are transposed. fix Transpose" in words
    assert check.index("</article>") < check.index("<table") < check.index('<details class="skipped">')


def test_an_aspect_is_as_good_as_the_property_that_looks_at_it(tmp_path: Path) -> None:
    rows = re.findall(r"<tr.*?</tr>", section(written(tmp_path, paged.affine), "origins"), re.DOTALL)
    told = {(words := Reader(row).text.strip()).partition(" handwritten ")[0]: words for row in rows}
    assert told["gradient of weight"].endswith("✗ gradient failed")
    assert told["result on cpu"].endswith("✓ forward passed")
    assert any(words.startswith("vmap derived") and words.endswith("vmap: not checked") for words in told)


def test_a_kernel_that_could_not_run_has_not_passed(tmp_path: Path) -> None:
    where = paged.affine.specification.kernels[0].where
    note = f"the kernel for cuda, {where}, did not run: there is no GPU"
    report = Report(paged.affine.name, (Outcome("forward", "passed", notes=(note,)),), seed=0)
    text = written(tmp_path, paged.affine, reports={report.operator: report})
    row = re.search(r"<tr[^>]*>\s*<th[^>]*>result on cpu.*?</tr>", text, re.DOTALL)
    assert row is not None
    assert "– forward: did not run here" in Reader(row[0]).text
    assert "passed" not in row[0]


@pytest.mark.slow
def test_sources_are_shown_word_for_word(text: str) -> None:
    words = [Reader(each).words for each in re.findall(r"<pre.*?</pre>", section(text, "code"), re.DOTALL)]
    shown = ["".join(each).strip() for each in words]
    assert shown[0].splitlines()[:2] == [
        '@opsmith.operator("paged::affine", shapes="x: B M, weight: N M, bias: N -> B N", results=("y",))',
        "def affine(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scale: float = 1.0) -> Tensor:",
    ]
    assert "Compute" not in shown[0]  # the docstring stands at the top
    assert shown[1:3] == [
        "lambda grad, weight, scale: scale * grad @ weight",
        "lambda grad, x, scale: scale * grad.mT @ x",
    ]
    assert shown[3].startswith("@affine.samples\ndef affine_samples(make: opsmith.Make)")
    assert len(shown) == 4


@pytest.mark.slow
def test_what_is_saved_is_what_autograd_keeps(text: str) -> None:
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.untyped_storage().nbytes()), lambda nothing: nothing
    ):
        sample = (torch.ones(4, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True))
        paged.affine(*sample, torch.ones(2, requires_grad=True))
    memory = section(text, "memory")
    shown = [int(each) for each in re.findall(r'<td class="number">(\d+) B</td>', memory)]
    assert sorted(shown) == sorted(kept) != []
    assert f"keeps {sum(kept)} B for the backward" in Reader(memory).text


@pytest.mark.slow
def test_the_graph_can_be_unfolded(text: str) -> None:
    graph = section(text, "graph")
    assert graph.count('class="opsmith-graph"') == 1
    assert "gradient of weight" in graph
    assert '"label":"bias"' in graph
    assert 'class="title">paged::affine</p>' in graph


@pytest.mark.slow
def test_kernels_are_listed(text: str) -> None:
    words = Reader(section(text, "kernels")).text
    assert "cpu Python computed tests/pages/paged.py:" in words
    assert "float32" in words


@pytest.mark.slow
def test_a_benchmark_has_its_pictures_and_tables(text: str) -> None:
    benchmark = section(text, "benchmark")
    assert benchmark.count("<svg") == 2
    words = Reader(benchmark).text
    assert "forward operator 100 µs" in words
    assert "cpu copies 1.00 GB/s of 10.0 kB" in words


@pytest.mark.slow
def test_each_kind_of_body_tells_what_became_of_it(text: str) -> None:
    words = Reader(section(text, "onnx")).text
    assert "function a node of the operator's name, with its reference as a function in the file" in words
    assert "opset 20; 1 of paged::affine; off by 1.0e-07, allowed 1.0e-06 a note" in words
    assert words.count("✗ refused ExportError: sort has no counterpart") == 1
    assert "exported, not verified no kernel for a node opset 20; 1 of paged::affine" in words


@pytest.mark.slow
def test_the_environment_names_versions_machine_and_compiler(text: str) -> None:
    words = Reader(section(text, "environment")).text
    for name in ("opsmith", "torch", "python", "processor", "compiler"):
        assert f"{name} " in words
    assert torch.__version__ in words


def test_without_samples_each_section_that_needs_one_says_so(tmp_path: Path) -> None:
    text = written(tmp_path, paged.bare, reports={})
    for name, words in {
        "check": "there are no samples",
        "graph": "has no samples",
        "memory": "has no samples",
    }.items():
        found = section(text, name)
        assert 'class="absent"' in found
        assert words in Reader(found).text, name
        assert "@bare.samples" in Reader(found).text
    assert "it has no kernel: the reference computes every call" in text
    assert "samples missing a check, a drawing, an export and a benchmark need samples" in Reader(text).text
    assert "not benchmarked: opsmith page ... --benchmark measures it" in Reader(text).text
    assert "It has no docstring" in text


def test_an_operator_that_raises_has_a_page_all_the_same(tmp_path: Path) -> None:
    text = written(tmp_path, paged.raising)
    for name in ("graph", "memory"):
        assert "ValueError: no such thing" in section(text, name)
    assert Reader(text).open == []


def test_one_that_fails_its_check_is_not_benchmarked_and_says_so(tmp_path: Path) -> None:
    text = written(tmp_path, paged.affine, benchmarks=True)
    words = Reader(section(text, "benchmark")).text
    assert "it fails its check, so its speed means nothing" in words
    assert "gradient of weight: transposed" in words


def test_without_matplotlib_the_tables_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opsmith.benchmarking.plotting", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = written(tmp_path, paged.affine, benchmarks={"paged::affine": measured("paged::affine")})
    benchmark = section(text, "benchmark")
    assert "<svg" not in benchmark
    words = Reader(benchmark).text
    assert "pip install '.[benchmark]' in a checkout of opsmith" in words
    assert "forward operator 100 µs" in words


def test_without_the_packages_of_onnx_its_section_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(operator: Any) -> Any:
        raise errors.MissingExtraError("an export needs the package `onnx`", hint="pip install '.[onnx]'")

    monkeypatch.setattr(content, "exports_of", missing)
    words = Reader(section(written(tmp_path, paged.plain), "onnx")).text
    assert "an export needs the package onnx hint: pip install '.[onnx]'" in words


@pytest.mark.parametrize("operator", [paged.in_numpy, paged.step, paged.double], ids=lambda each: each.name)
def test_every_kind_of_operator_has_a_page(tmp_path: Path, operator: opsmith.Operator[..., Any]) -> None:
    read = Reader(written(tmp_path, operator))
    assert read.open == []
    assert operator.name in read.text


def test_what_is_looked_at_is_told(tmp_path: Path) -> None:
    said: list[tuple[str, int, int]] = []
    written(tmp_path, paged.plain, progress=lambda *each: said.append(each))
    assert said == [
        *(
            (f"paged::plain: {what}", 0, 1)
            for what in ("graph", "kernels", "memory accesses", "ONNX", "benchmark")
        ),
        ("", 1, 1),
    ]


@pytest.mark.slow
def test_a_mistake_of_the_sections_is_not_hidden_from_tests(tmp_path: Path) -> None:
    looked = content.collect_content(
        paged.affine,
        lambda what: None,
        report=paged.passed(paged.affine),
        benchmark=measured("paged::affine"),
        effort="quick",
        seed=0,
        architectures=(),
    )
    absent = [name for name, value in vars(looked).items() if isinstance(value, AbsentSection)]
    assert absent == []


def test_a_kernel_in_cuda_cpp_has_its_accesses_by_line(tmp_path: Path) -> None:
    @opsmith.operator("paged::halved")
    def halved(x: torch.Tensor) -> torch.Tensor:
        return x[::2].clone()

    code = """
template <class T>
__global__ void halved(Contiguous<const T> x, Contiguous<T> y) {
  OPSMITH_EACH(i, y.numel()) y[i] = x[2 * i];
}
"""
    halved.kernel("cuda", cuda=code, grid=1, block=32, dtypes=[torch.float64, torch.float32])
    halved.samples(lambda make: [(make(64),)])
    found = Reader(section(written(tmp_path, halved), "accesses")).text
    assert "halved in float32, 1 call" in found
    assert "×2.0 reads x 1 32.0 8.0 sectors" in found
    assert "×1.0 writes result 1 32.0 4.0 sectors" in found
    assert "y[i] = x[2 * i];" in found


@pytest.mark.slow
def test_an_operator_without_a_kernel_in_cuda_cpp_has_no_access_model(text: str) -> None:
    assert "It has no kernel in CUDA C++" in section(text, "accesses")
