"""Kernels in C++ compute what the reference does: in all sizes, strides, dtypes and kinds of argument."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cpp_operators import channel_sums, row_sums, scaled, told
from kernel_cases import EVERY, SHAPES, WIDE
from kernel_cases import WITH_NEGATIVE as LAYOUTS
from matrices import diagonal
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith.core.kernels import BuiltKernel
from opsmith.kernels.cpp import compiler


def kernel_of(operator: Any) -> Any:
    function = operator.specification.kernels[0].function
    assert isinstance(function, BuiltKernel)
    return function


@pytest.mark.parametrize(("dtype", "shape", "layout"), diagonal(EVERY, SHAPES, LAYOUTS, every=4))
def test_every_dtype_layout_and_size(dtype: torch.dtype, shape: tuple[int, int], layout: str) -> None:
    x = LAYOUTS[layout](torch.randn(shape, dtype=torch.float64).to(dtype))
    shift = torch.randn(4, dtype=torch.float64).to(dtype)[2:]
    for arguments in ((x, 2.0), (x, -0.5, shift)):
        result = scaled(*arguments)
        right = scaled.reference(*arguments)
        assert_close(result, right)
        if x.numel():  # torch's own stand-ins have other strides than its tensors where there is no element
            assert result.stride() == right.stride()


@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4, 5)], ids=str)
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert_close(scaled(x, 2.0), x * 2)


def test_a_large_tensor_is_shared_among_threads() -> None:
    x = torch.randn(300, 400)
    assert_close(scaled(x, 3.0), x * 3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_several_results_and_any_strides(dtype: torch.dtype, layout: str) -> None:
    x = LAYOUTS[layout](torch.randn(4, 6, dtype=dtype))
    before = dict(kernel_of(row_sums).copied)
    assert_close(row_sums(x), row_sums.reference(x))
    assert kernel_of(row_sums).copied == before == {}


@pytest.mark.parametrize("channels_last", [True, False])
def test_channels_last(channels_last: bool) -> None:
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    kernel_of(channel_sums).copied.clear()
    assert_close(channel_sums(x), channel_sums.reference(x))
    assert kernel_of(channel_sums).copied == ({} if channels_last else {"x": 1})
    assert channel_sums.explain(x).copies == (() if channels_last else ("`x`, which is not channels-last",))


@pytest.mark.slow
def test_every_kind_of_argument() -> None:
    x = torch.ones(1, dtype=torch.float64)
    others = [torch.arange(3.0, dtype=torch.float64), torch.ones(4, dtype=torch.float64)[::2]]
    full = (x, others, [1, -2, 2**40], [0.5, 1.25], [True, False, True], "été, in bytes", -7, True)
    for arguments in ((*full, 3, 0.25, "word"), full, (x, [], [], [], [], "t", 0, False, 0, 0.0, "")):
        assert_close(told(*arguments), told.reference(*arguments))


def test_gradients_are_the_reference_s() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    shift = torch.randn(2, requires_grad=True)
    gradients = torch.autograd.grad(scaled(x, 2.0, shift).sum(), (x, shift))
    assert_close(gradients, (torch.full_like(x, 2.0), torch.tensor([15.0, 0.0])))


@pytest.mark.slow
@pytest.mark.every(8)
@pytest.mark.parametrize("operator", [scaled, row_sums, channel_sums], ids=lambda each: each.__name__)
def test_check_passes(operator: Any) -> None:
    report = opsmith.check(operator, skip=["compile", "export", "opcheck"], effort="quick")
    assert report.passed, str(report)
    forward = next(each for each in report.outcomes if each.property == "forward")
    assert forward.status == "passed"


@pytest.mark.compile
@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiled_code_calls_it(dynamic: bool) -> None:
    compiled = torch.compile(lambda x: scaled(x + 1, 2.0) - 1, fullgraph=True, dynamic=dynamic)
    for size in (5, 6, 7):
        x = torch.randn(3, size)
        assert_close(compiled(x), (x + 1) * 2 - 1)


def test_what_it_does_not_take_is_computed_by_the_reference_and_explain_says_why() -> None:
    x = torch.ones(2, dtype=torch.float64)
    assert_close(scaled(x, 2.0), x * 2)
    (reason,) = scaled.explain(x, 2.0).rejected
    assert reason.endswith(": `x` is float64, but the kernel takes float32 or float16 or bfloat16")
    assert scaled.explain(x, 2.0).forward.startswith("reference, ")
    (reason,) = scaled.explain(torch.ones(2), 2.0, torch.ones(1, 1)).rejected
    assert reason.endswith(": `shift` has 2 dimensions, but the kernel takes 1")


def test_explain_names_its_line_and_what_it_copies() -> None:
    said = scaled.explain(torch.ones(3, 2).mT, 2.0)
    text = Path(__file__).with_name("cpp_operators.py").read_text().splitlines()
    line = 1 + next(at for at, each in enumerate(text) if each.startswith("void scaled("))
    assert said.forward.endswith(f"cpp_operators.py:{line}")
    result = "`result`, which the reference does not return as contiguous"
    assert said.copies == ("`x`, which is not contiguous", result)
    assert "    copies `x`, which is not contiguous" in str(said).splitlines()
    assert scaled.explain(torch.ones(3, 2), 2.0).copies == ()
    negative = LAYOUTS["negative"](torch.ones(3, 2))
    assert scaled.explain(negative.contiguous(), 2.0).copies == ()
    assert row_sums.explain(negative).copies == ("`x`, which has the negative bit",)


def test_what_it_throws_is_an_error_of_python() -> None:
    with pytest.raises(opsmith.errors.KernelError) as caught:
        scaled(torch.ones(2), 7.0)
    assert caught.value.message().splitlines() == [
        "cpp_kernels::scaled: the C++ kernel threw: `by` is 7, of all numbers",
        f"  where: {kernel_of(scaled).where}",
        "  hint: call it with arguments that the kernel takes, or correct the kernel",
    ]
    assert_close(scaled(torch.ones(2), 2.0), torch.full((2,), 2.0))  # and nothing is broken afterwards


def test_other_threads_run_meanwhile() -> None:
    @opsmith.operator("cpp_kernels::slow")
    def slow(x: Tensor) -> Tensor:
        return x.clone()

    # It waits until another thread has written into its argument three times, or for a minute.
    slow.kernel(
        "cpu",
        cpp="""
#include <unistd.h>
void slow(View<const float, 1> x, View<float, 1> y) {
  const float first = x(0);
  for (int i = 0; i < 60000 && x(0) < first + 3; ++i) usleep(1000);
  y(0) = x(0) - first;
}
""",
    )
    count = np.zeros(1, dtype=np.float32)
    x, done = torch.from_numpy(count), threading.Event()

    def write() -> None:
        while not done.is_set():
            count[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert slow(x).item() >= 3
    finally:
        done.set()
        thread.join()


@pytest.mark.slow
def test_threads_of_torch_are_those_of_the_kernel() -> None:
    @opsmith.operator("cpp_kernels::thread_count")
    def thread_count(x: Tensor) -> Tensor:
        return torch.full_like(x, torch.get_num_threads())

    thread_count.kernel(
        "cpu",
        cpp="""
#include <omp.h>
void thread_count(View<const int64_t> x, View<int64_t, 1> y) { y(0) = omp_get_max_threads(); }
""",
    )
    before = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert thread_count(torch.zeros(1, dtype=torch.int64)).item() == count
    finally:
        torch.set_num_threads(before)


def test_called_by_many_threads_at_once() -> None:
    x = torch.randn(50, 60)
    wrong: list[Exception] = []

    def run(by: float) -> None:
        try:
            for _ in range(50):
                assert_close(scaled(x.mT, by), x.mT * by)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(float(by),)) for by in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_numbers_of_16_bits_have_the_assignments_of_others() -> None:
    @opsmith.operator("cpp_kernels::assigned")
    def mixed(x: Tensor) -> Tensor:
        return ((x + x - 1) * x) / 3

    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    mixed.kernel(
        "cpu",
        entry="f",
        dtypes=dtypes,
        cpp="template <class T> void f(View<const T, 1> x, View<T, 1> y) {\n"
        "  for (int64_t i = 0; i < x.size(0); i++) {\n"
        "    T s = x(i); s += x(i); s -= 1; s *= x(i); s /= 3; y(i) = s;\n  }\n}",
    )
    for dtype in dtypes:
        x = torch.tensor([0.3, -2.5, 7.125], dtype=dtype)
        assert mixed.explain(x).forward.startswith("kernel")
        assert_close(mixed(x), mixed.reference(x), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.every(5)
@pytest.mark.parametrize("kind", ["Half", "BFloat16"])
def test_numbers_of_16_bits_round_as_torch_s_do(kind: str) -> None:
    dtype = {"Half": torch.float16, "BFloat16": torch.bfloat16}[kind]

    @opsmith.operator(f"cpp_kernels::to_{kind.lower()}")
    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype)

    rounded.kernel(
        "cpu",
        entry="f",
        cpp=f"void f(View<const float, 1> x, View<{kind}, 1> y)\n"
        "{ for (int64_t i = 0; i < x.size(0); i++) y(i) = x(i); }",
    )

    @opsmith.operator(f"cpp_kernels::from_{kind.lower()}")
    def widened(x: Tensor) -> Tensor:
        return x.to(torch.float32)

    widened.kernel(
        "cpu",
        entry="f",
        cpp=f"void f(View<const {kind}, 1> x, View<float, 1> y)\n"
        "{ for (int64_t i = 0; i < x.size(0); i++) y(i) = x(i); }",
    )
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    assert_close(widened(every), every.float(), rtol=0, atol=0, equal_nan=True)
    # Around each of them, and halfway to the next: where rounding decides.
    exact = every.float()[every.isfinite()].sort().values
    halves = (exact[1:].double() + exact[:-1].double()) / 2
    near = torch.cat([exact, *(halves.float() * factor for factor in (1.0, 1 + 2**-22, 1 - 2**-22))])
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 65519.9, 65520.0, 1e-45])
    x = torch.cat([near, special])
    assert_close(rounded(x), x.to(dtype), rtol=0, atol=0, equal_nan=True)


TWICE = """
template <class T>
void twice(Contiguous<const T> x, Contiguous<T> y) {
  for (int64_t i = 0; i < x.numel(); i++) y[i] = x[i] * T(%s);
}
"""


def doubled(x: Tensor) -> Tensor:
    return x * 2


def tripled(x: Tensor) -> Tensor:
    return x * 3


@pytest.mark.slow
def test_a_kernel_for_each_dtype_is_compiled_when_its_dtype_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[torch.dtype, ...]] = []

    def watched(source: Any, operator: str, dtypes: tuple[torch.dtype, ...]) -> Any:
        compiled.append(dtypes)
        return compile_kernel(source, operator, dtypes)

    compile_kernel = compiler.compile_kernel
    monkeypatch.setattr(compiler, "compile_kernel", watched)  # imported with the first kernel
    twice: Any = opsmith.operator("cpp_kernels::twice_by_dtype")(doubled)
    for dtype in (torch.float32, torch.float64):
        twice.kernel("cpu", cpp=TWICE % 2, entry="twice", dtypes=[dtype])
    for dtype in (torch.float32, torch.float64, torch.float16):
        x = torch.ones(3, dtype=dtype)
        assert_close(twice(x), x * 2)
        said = twice.explain(x)
        assert said.forward.startswith("reference" if dtype == torch.float16 else "kernel for cpu")
    assert compiled == [(torch.float32,), (torch.float64,)]
    assert [each.rpartition(": ")[2] for each in said.rejected] == [
        "`x` is float16, but the kernel takes float64",
        "`x` is float16, but the kernel takes float32",
    ]


def test_a_template_is_refused_for_the_instance_whose_dtypes_fit() -> None:
    twice: Any = opsmith.operator("cpp_kernels::twice_of_two_dtypes")(doubled)
    source = (TWICE % 2).replace("T> ", "T, 1> ")
    twice.kernel("cpu", cpp=source, dtypes=[torch.float32, torch.float64], entry="twice")
    for dtype in (torch.float32, torch.float64):
        (reason,) = twice.explain(torch.ones(2, 2, dtype=dtype)).rejected
        assert reason.endswith(": `x` has 2 dimensions, but the kernel takes 1")
    (reason,) = twice.explain(torch.ones(2, dtype=torch.float16)).rejected
    assert reason.endswith(": `x` is float16, but the kernel takes float32 or float64")


def test_a_kernel_given_again_replaces_what_it_has_a_dtype_in_common_with() -> None:
    thrice: Any = opsmith.operator("cpp_kernels::thrice_again")(tripled)

    def taken() -> list[set[torch.dtype]]:
        return [set(each.function.dtypes) for each in thrice.specification.kernels]

    both, single, double = [torch.float32, torch.float64], [torch.float32], [torch.float64]
    thrice.kernel("cpu", cpp=TWICE % 2, entry="twice", dtypes=both)  # wrong, and so run again in the notebook
    thrice.kernel("cpu", cpp=TWICE % 3, entry="twice", dtypes=single)
    assert taken() == [{torch.float32}]
    thrice.kernel("cpu", cpp=TWICE % 3, entry="twice", dtypes=double)
    assert taken() == [{torch.float64}, {torch.float32}]
    assert_close(thrice(torch.ones(2)), torch.full((2,), 3.0))
    thrice.kernel("cpu", cpp=TWICE % 3, entry="twice", dtypes=both)
    assert taken() == [set(both)]


@pytest.mark.slow
def test_a_template_for_other_dtypes_stands_beside_one_for_the_usual_ones() -> None:
    thrice: Any = opsmith.operator("cpp_kernels::thrice_beside")(tripled)
    for dtypes in (None, [torch.float16]):
        thrice.kernel("cpu", cpp=TWICE % 3, entry="twice", dtypes=dtypes)
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert thrice.explain(torch.ones(2, dtype=dtype)).forward.startswith("kernel for cpu")
    thrice.kernel("cpu", cpp=TWICE % 3, entry="twice")
    assert [each.function.dtypes for each in thrice.specification.kernels] == [
        (torch.float32, torch.float64),
        (torch.float16,),
    ]


def copied_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x * 3


RESULT_LAYOUTS = {
    "contiguous": ("Contiguous<T, 4> y, Contiguous<T, 4> z", ["y", "z"], "contiguous"),
    "one of two": ("View<T, 4> y, Contiguous<T, 4> z", ["z"], "contiguous"),
    "channels-last": ("ChannelsLast<T, 4> y, ChannelsLast<T, 4> z", [], ""),
    "any": ("View<T, 4> y, View<T, 4> z", [], ""),
}


@pytest.mark.parametrize("hidden", [False, True], ids=["shown", "hidden"])
@pytest.mark.parametrize("form", RESULT_LAYOUTS)
def test_explain_names_each_copy_of_a_result(form: str, hidden: bool) -> None:
    views, copied, layout = RESULT_LAYOUTS[form]
    name = f"copied_{form.replace(' ', '_').replace('-', '_')}_{hidden}"
    operator = opsmith.operator(f"cpp_copies::{name}", results=("y", "z"), hidden=("z",) * hidden)(
        copied_twice
    )
    operator.kernel(
        "cpu",
        cpp=f"template <class T> void copied(View<const T, 4> x, {views}) {{"
        "for (int64_t i = 0; i < x.size(0); i++) for (int64_t j = 0; j < x.size(1); j++)"
        "for (int64_t k = 0; k < x.size(2); k++) for (int64_t l = 0; l < x.size(3); l++)"
        "{ y(i, j, k, l) = 2 * x(i, j, k, l); z(i, j, k, l) = 3 * x(i, j, k, l); } }",
        dtypes=[torch.float32],
        entry="copied",
    )
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    found = operator.explain(x).copies
    assert found == tuple(f"`{each}`, which the reference does not return as {layout}" for each in copied)
    operator(x)
    with torch.profiler.profile() as profile:
        y = operator(x)[0] if not hidden else operator(x)
    torch.testing.assert_close(y, x * 2)
    assert y.stride() == (x * 2).stride()
    assert sum(event.count for event in profile.key_averages() if event.key == "aten::copy_") == len(copied)
