"""README.md shows examples as they are, and what they really print."""

from __future__ import annotations

import ast
import importlib
import inspect
import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import onnxruntime
import pytest
import torch
from doc_pages import fenced_blocks, pages, python_blocks, same
from readme_examples import EXAMPLES, FOLDER, README, printed, without_folder

BLOCKS = [
    pytest.param(block, path, id=path.name)
    for block, path in zip(python_blocks(README.read_text(encoding="utf-8")), EXAMPLES, strict=True)
]


@pytest.mark.parametrize(("block", "path"), BLOCKS)
def test_an_example_is_its_file(block: object, path: Path) -> None:
    assert "".join(f"{line}\n" for line in block.code.lines) == path.read_text(encoding="utf-8")  # type: ignore[attr-defined]


def assert_same(output: str, block: Any) -> None:
    if not same(output, block.expected):
        assert output == block.expected


def run_main_of(module: ModuleType) -> None:
    """Run what a module does as a program alone: its last statement, an `if`."""
    tree = ast.parse(inspect.getsource(module))
    (*_, last) = tree.body
    assert isinstance(last, ast.If)
    tree.body = last.body
    exec(compile(tree, str(module.__file__), "exec"), vars(module))


@pytest.mark.compile
@pytest.mark.parametrize(("block", "path"), BLOCKS)
def test_the_output_is_what_an_example_prints(
    block: object, path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(FOLDER)  # as Python does for a program
    if path.name == "rms.py":  # wrong.py imports it, and a process declares an operator in one module alone
        run_main_of(importlib.reload(importlib.import_module(path.stem)))
    else:
        runpy.run_path(str(path), run_name="__main__")
    output = without_folder(capsys.readouterr().out)
    assert_same(output, block)


@pytest.mark.slow  # a process of its own imports torch, and compiles for the first time
@pytest.mark.parametrize(("block", "path"), BLOCKS)
def test_a_program_prints_the_same(block: object, path: Path) -> None:
    assert_same(printed(path), block)


class Norm(torch.nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight)  # type: ignore[operator, no-any-return]


@pytest.mark.slow
@pytest.mark.compile
def test_the_operator_without_opsmith_works_and_lacks_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison is fair: each of its six pieces works, and what is said to be missing is missing."""
    monkeypatch.syspath_prepend(FOLDER)
    before, after = importlib.import_module("before"), importlib.import_module("rms")
    before.test_gradient()
    x = torch.randn(4, 8)
    model = Norm(before.rms_norm).eval()
    expected = Norm(after.rms_norm)(x)
    torch.testing.assert_close(model(x), expected)
    table = {torch.ops.before.rms_norm.default: before.to_onnx}
    program = torch.onnx.export(model, (x,), dynamo=True, custom_translation_table=table, verbose=False)
    assert program is not None
    program.save(str(tmp_path / "before.onnx"))
    (given,) = onnxruntime.InferenceSession(tmp_path / "before.onnx").run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(given), expected.detach())

    tangent = torch.func.jvp(
        lambda x: before.rms_norm(x, model.weight.detach()), (x,), (torch.ones_like(x),)
    )[1]
    assert not tangent.any(), "torch computes forward mode of a custom operator now: correct the README"
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: before.rms_norm(x, model.weight.detach()).sum())(x)
    assert before.rms_norm(x.half(), model.weight).dtype != x.half().dtype  # which the fake kernel promises


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 130


FENCES = ("opening", "closing")  # a word each


def test_the_documentation_can_be_read() -> None:
    """README and docs/ have at most 40,000 words outside of their fences."""
    words = 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        inside = [len(" ".join(each.lines).split()) + len(FENCES) for each in fenced_blocks(text)]
        words += len(text.split()) - sum(inside)
    assert words <= 40_000
