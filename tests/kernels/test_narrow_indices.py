"""Indices of 32 bits in kernels: named by compilers, silent once the hint is followed, refused by calls."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.kernels.cpp import compiler
from opsmith.kernels.cpp.diagnostics import NarrowIndex

MANY = 2**31
HINT = "declare its numbers as `int64_t`, or multiply as in `int64_t(i) * n`"
LETTERS = map("narrow::o{}".format, itertools.count())

FOUND = """
int i = y.size(0), C = x.size(1); unsigned u = 3;
for (int c = 0; c < C; c++) y[i * C + c] = T(2) * x[i * C + (c + u)];  // y[i * C + c], x[i * C + (c + u)]
for (int at = 0; at < x.numel(); ++at) y[at] = 0;  // y[at]
\ty[static_cast<int>(x.numel()) - 1] = 0;  // y[static_cast<int>(x.numel()) - 1]
y [threads()] = x[0] + z(i * C);  // y[threads()], z(i * C)
y[x[u] > 0 ? i : C] = 0;  // y[x[u] > 0 ? i : C], x[u]
AT(i + 1) = 0;  // AT
helped(y, i);
"""
"""Lines with indices of 32 bits, which their comments name."""
SOUND = """
const int i = y.size(0), C = x.size(1); const int64_t wide = 3; const size_t size = 3; short few = 2;
y[int64_t(i) * C] = x[(int64_t)i * C + i] + x[wide * C + i] + x[size] + x[i * wide];
y(i, C) = x(i, i * C);
for (int64_t r = 0; r < wide; r++) y[r * C + i] = x[r];
y[0] = x[2 * 3] + x[1u] + z(0) + z(wide);
float sums[64]; sums[i * C] = 0;
int n = 0; for (int at = 0; at < x.numel(); at++) n += at;
y[wide] = n * C + few;
// y[i * C] = 0
"""
PREFIX = """
template <class V> void helped(V values, int i) { values[i + 1] = 0; }
#define AT(i) y[i]
"""
PUT = "template <class T> void put(Contiguous<T, 2> x, int at) { x[at + 1] = 0; }\n"
PARAMETERS = "(Contiguous<const T, 2> x, Contiguous<T, 2> y, View<T, 1> z)"


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x.sum(1)


def kernel_of(language: str, body: str, before: str = PREFIX) -> tuple[Any, str]:
    """Return a kernel with these lines, and its text."""
    if language == "C++":
        text = f"#include <cstdint>\n{before}unsigned threads() {{ return 3; }}\n"
        text += f"template <class T> void two{PARAMETERS} {{{body}}}"
        made = opsmith.operator(next(LETTERS))(two)
        made.kernel("cpu", cpp=text, entry="two")
    else:
        text = f"{PREFIX}__device__ unsigned threads() {{ return threadIdx.x; }}\n"
        text += f"template <class T> __global__ void two{PARAMETERS} {{__shared__ T tile[32]; int k = 3;\n"
        text += f"tile[k * blockDim.x] = 0; OPSMITH_EACH(at, y.numel()) y[at] = tile[k];{body}}}"
        made = opsmith.operator(next(LETTERS))(two)
        made.kernel("cuda", cuda=text, entry="two", grid=1, block=32)
    return made.specification.kernels[0].given, text


def expression(index: NarrowIndex) -> str:
    return index.reason.split("`")[1]


LANGUAGES = ["C++", "CUDA"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_compilers_name_each_index_of_32_bits_its_line_and_its_tensor(language: str) -> None:
    kernel, text = kernel_of(language, FOUND)
    found = kernel.narrow_indices([torch.ones(2, 3)])
    lines = text.split("\n")
    named = [
        (lines[int(each.where.rpartition(":")[2]) - kernel.source.line], expression(each)) for each in found
    ]
    for line in FOUND.split("\n"):
        _, comment, wanted = line.partition("  // ")
        here = {each for of, each in named if of == line}
        if wanted == "AT":  # g++ names the line of a macro's definition, and NVRTC that of its use
            assert {"y[i]", line} & {each for _, each in named}
        else:
            assert here == ({*wanted.split(", ")} if comment else set()), line
    tensors = {expression(each): sorted(each.tensors) for each in found}
    assert tensors["y[at]"] == ["result0"]
    assert tensors["z(i * C)"] == ["result1"]
    assert tensors["x[u]"] == ["x"]
    assert tensors["values[i + 1]"] == []
    assert found[0].reason == f"the index `{expression(found[0])}` has 32 bits: {HINT}"


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_sound_index_is_not_named(language: str) -> None:
    assert kernel_of(language, SOUND)[0].narrow_indices([torch.ones(2, 3)]) == []


def test_an_index_in_another_function_may_be_of_any_tensor() -> None:
    kernel, _ = kernel_of("C++", "put(y, 3); int i = y.size(0); y[i] = x[i] + z(i);", PREFIX + PUT)
    found = {expression(each): sorted(each.tensors) for each in kernel.narrow_indices([torch.ones(2, 3)])}
    assert found == {"x[at + 1]": [], "y[i]": ["result0"], "x[i]": [], "z(i)": ["result1"]}


def test_what_its_author_deprecates_is_no_index() -> None:
    old = "[[deprecated]] inline int64_t old() { return 1; }\n"
    assert kernel_of("C++", "y[old()] = 0;", old)[0].narrow_indices([torch.ones(2, 3)]) == []


@opsmith.operator("narrow::rows", shapes="x: B C -> C")
def rows(x: Tensor) -> Tensor:
    return x[0] * 2


ROWS_CPP = """
void rows(Contiguous<const float, 2> x, Contiguous<float, 1> y) {
  int64_t C = x.size(1);
  int row = 0;
  for (int64_t i = 0; i < C; i++) y[i] = x[row * int(C) + int(i)] * 2;
}"""
rows.kernel("cpu", cpp=ROWS_CPP)
TEXT = Path(__file__).read_text(encoding="utf-8").splitlines()
LINE = 1 + TEXT.index("  for (int64_t i = 0; i < C; i++) y[i] = x[row * int(C) + int(i)] * 2;")
ROW = "x[row * int(C) + int(i)]"


def test_a_kernel_in_cpp_leaves_more_elements_than_it_counts_to_the_reference() -> None:
    few, many = torch.ones(2, 3), torch.ones(1, 1).expand(2**20, 2**11)
    kernel: Any = rows.specification.kernels[0].given
    assert kernel.refusal([few]) is None
    assert kernel.refusal([many[:-1]]) is None
    assert kernel.refusal([many]) == (
        f"`x` has {MANY} elements, and at {__file__}:{LINE} the index `{ROW}` has 32 bits: {HINT}"
    )
    assert torch.equal(rows(many), torch.full((2**11,), 2.0))
    assert f"`x` has {MANY} elements" in str(rows.explain(many))


def test_a_strict_kernel_refuses_them_by_an_error() -> None:
    strict = opsmith.operator("narrow::strict")(_first_row)
    strict.kernel("cpu", cpp=ROWS_CPP, entry="rows", strict=True)
    assert strict(torch.ones(2, 3)).tolist() == [2, 2, 2]
    with pytest.raises(errors.KernelRefusedError, match=r"the index `x\[row \* .*` has 32 bits: declare"):
        strict(torch.ones(1, 1).expand(2**20, 2**11))


def _first_row(x: Tensor) -> Tensor:
    return x[0] * 2


def test_sizes_from_cpp_are_planned_in_python_beyond_an_int() -> None:
    @opsmith.operator("narrow::head", shapes="x: N M -> M")
    def head(x: Tensor) -> Tensor:
        return x[0].clone()

    head.kernel("cpu", cpp="void head(Contiguous<const uint8_t, 2> x, Contiguous<uint8_t, 1> y) {"
                "int M = x.size(1); for (int i = 0; i < M; i++) y[i] = x[0 * M + i] + 1; }")  # fmt: skip
    few = torch.zeros(2, 3, dtype=torch.uint8)
    for _ in range(3):
        assert head(few).tolist() == [1, 1, 1]  # by the kernel
    assert head(torch.zeros(5, 2, dtype=torch.uint8)).tolist() == [1, 1]
    many = torch.empty(2**22, 2**9, dtype=torch.uint8)  # pages that nobody writes to are no memory
    many[0] = 0
    assert head(many).unique().tolist() == [0]


def test_a_result_that_a_kernel_does_not_count_is_an_error_before_it_runs() -> None:
    @opsmith.operator("narrow::outer")
    def outer(x: Tensor, y: Tensor) -> Tensor:
        return (x[:, None] * y).expand(2**10, 2**11, 2**11)

    outer.kernel("cpu", cpp="void outer(View<const float> x, View<const float> y, Contiguous<float, 3> z) {"
                 "for (int i = 0; i < 9; i++) z[i * 9] = 0; }")  # fmt: skip
    x = torch.ones(1)
    with pytest.raises(errors.KernelRefusedError) as refused:
        outer(x, x)
    assert refused.value.message().splitlines() == [
        f"narrow::outer: the kernel cannot write this result: `result` has {2**32} elements, and at "
        f"{refused.value.where} the index `z[i * 9]` has 32 bits: {HINT}",
        f"  where: {refused.value.where}",
    ]
    with pytest.raises(errors.KernelRefusedError):
        outer(x, x)  # no plan is kept


def test_where_no_compiler_tells_a_kernel_takes_no_more_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    @opsmith.operator("narrow::first")
    def first(x: Tensor) -> Tensor:
        return x[0] * 2

    first.kernel("cpu", cpp=ROWS_CPP.replace("row * int(C) + int(i)", "i"), entry="rows")
    many = torch.ones(1, 1).expand(2**20, 2**11)
    kernel: Any = first.specification.kernels[0].given
    assert kernel.refusal([many[:-1]]) is None
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert kernel.refusal([many[:-1]]) is None
    unknown = "no compiler can say if the kernel's indices have 32 bits: there is no C++ compiler"
    assert kernel.refusal([many]) == f"`x` has {MANY} elements, and {unknown}"
    monkeypatch.undo()
    assert kernel.refusal([many]) is None


def test_check_says_that_no_compiler_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise errors.ToolchainError("there is no C++ compiler")

    monkeypatch.setattr(compiler, "index_warnings", refuse)
    report = opsmith.check(rows, samples=[(torch.ones(2, 3),)], only=["forward"], effort="quick")
    (outcome,) = (each for each in report.outcomes if each.property == "forward")
    where = rows.specification.kernels[0].where
    assert f"no compiler shows if indices of {where} have 32 bits: there is no C++ compiler" in outcome.notes


CUDA = """
template <class T> __global__ void planes(Contiguous<const T, 3> x, View<T, 1> y) {
  const auto W = int(x.size(2)), H = int(x.size(1));
  for (int b = threadIdx.x; b < x.size(0); b += blockDim.x) {
    y(int64_t(b)) = x[b * H * W];
  }
}"""


def planes(x: Tensor) -> Tensor:
    return x[:, 0, 0].clone()


def cuda_operator(name: str, text: str = CUDA) -> Any:
    operator: Any = opsmith.operator(f"narrow::{name}")(planes)
    operator.kernel("cuda", cuda=text, entry="planes", grid=1, block=32)
    return operator


def test_a_cuda_kernel_refuses_them() -> None:
    kernel = cuda_operator("cuda").specification.kernels[0].given
    many = torch.empty(2**11, 2**10, 2**10, device="meta")
    line = 1 + TEXT.index("    y(int64_t(b)) = x[b * H * W];")
    assert kernel.choose([many], "sm_90") == (
        f"`x` has {MANY} elements, and at {__file__}:{line} the index `x[b * H * W]` has 32 bits: {HINT}"
    )
    followed = cuda_operator("cuda_in_64_bits", CUDA.replace("b * H", "int64_t(b) * H"))
    kernel = followed.specification.kernels[0].given
    assert kernel.narrow_indices([many]) == []
    assert not isinstance(kernel.choose([many], "sm_90"), str)


def test_check_reports_a_kernel_in_cuda_as_a_limit_with_its_line() -> None:
    samples = [(torch.ones(2, 3, 4),)]
    report = opsmith.check(cuda_operator("checked"), samples=samples, only=["resources"], effort="quick")
    (failure,) = (each for each in report.failures if each.property == "resources")
    assert (failure.property, failure.input, failure.cause, failure.severity) == (
        *("resources", "x", "narrow-index"),
        "limit",
    )
    assert failure.message == (
        f"the index `x[b * H * W]` has 32 bits: {HINT}; its kernel refuses a tensor of more than "
        "2**31 - 1 elements"
    )
    line = 1 + TEXT.index("    y(int64_t(b)) = x[b * H * W];")
    assert failure.where == f"{__file__}:{line}"
    assert not failure.replay


def test_check_reports_a_kernel_in_cpp_and_names_each_line() -> None:
    @opsmith.operator("narrow::turned")
    def turned(x: Tensor) -> Tensor:
        return x * 2

    text = """
void turned(Contiguous<const float, 2> x, Contiguous<float, 2> y) {
  const int R = x.size(0), C = x.size(1);
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) y[r * C + c] = 2 * x[r * C + c];
  for (int i = 0; i < x.numel(); i++) y[i] = 2 * x[i];
}"""
    turned.kernel("cpu", cpp=text)
    report = opsmith.check(turned, samples=[(torch.randn(3, 4),)], only=["forward"], effort="quick")
    found = [each for each in report.failures if each.cause == "narrow-index"]
    assert [(each.property, each.severity) for each in found] == [("forward", "limit")]
    line = int(str(found[0].where).rpartition(":")[2])
    assert found[0].evidence == {"others": f"{__file__}:{line + 1}"}
    assert report.passed_as_asked


def test_a_scratch_buffer_is_no_tensor_of_a_call() -> None:
    operator: Any = opsmith.operator("narrow::total")(_total)
    operator.kernel(
        "cuda",
        cuda="""
template <class T> __global__ void part(Contiguous<const T> x, Contiguous<T, 1> sums) {
  T sum = 0;
  OPSMITH_EACH(i, x.numel()) sum += x[i];
  sums[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
template <class T> __global__ void fold(Contiguous<const T, 1> sums, Contiguous<T, 0> y) {
  T sum = 0;
  for (int i = 0; i < sums.numel(); i++) sum += sums[i];
  y[0] = sum;
}""",
        scratch={"sums": (64, "x")},
        launches=[
            opsmith.Launch("part(x, sums)", grid=2, block=32),
            opsmith.Launch("fold(sums, result)", grid=1, block=1),
        ],
    )
    report = opsmith.check(operator, samples=[(torch.ones(9),)], only=["resources"], effort="quick")
    assert not [each for each in report.failures if each.cause == "narrow-index"], report


def _total(x: Tensor) -> Tensor:
    return x.sum()
