"""Right kernels pass in the interpreter or are skipped with its reason: what it lacks is not their fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.kernels.triton.interpreter import missing_interpreter

triton = pytest.importorskip("triton", reason="Triton is not installed: no part of a torch for the CPU")

import triton.language as tl  # noqa: E402
from triton.language import arange, load, program_id, store  # noqa: E402
from triton.language.extra import libdevice  # noqa: E402
from triton.language.extra.libdevice import rsqrt  # noqa: E402
from triton.language.math import fma  # noqa: E402

pytestmark = pytest.mark.skipif(missing_interpreter() is not None, reason=str(missing_interpreter()))


def scaled(name: str, kernel: Any, **words: Any) -> Any:
    """An operator `x * by`, with a kernel of elements."""

    @opsmith.operator(f"interpreted_language::{name}")
    def scaled(x: Tensor, by: float, negated: bool = False) -> Tensor:
        return x * (-by if negated else by)

    scaled.samples(lambda make: [(make(5, 3), 1.5), (make(4), 0.75, True)])
    given = {"grid": lambda x: triton.cdiv(x.numel(), 8), "constants": {"BLOCK": 8}, **words}
    return scaled.kernel("cuda", triton=kernel, **given)


def outcome_of(operator: Any) -> Any:
    report = opsmith.check(operator, only=["triton"], effort="quick")
    return next(each for each in report.outcomes if each.property == "triton")


@triton.jit
def quoted(x, result, x_numel, by, negated, BLOCK: "triton.language.constexpr"):  # noqa: UP037
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sign = -1.0 if negated else 1.0
    tl.store(result + at, tl.load(x + at, mask=at < x_numel) * by * sign, mask=at < x_numel)


@triton.jit
def float_with_to(x, result, x_numel, by, negated, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(x + at, mask=at < x_numel)
    factor = by.to(numbers.dtype) if numbers.dtype == tl.float32 else by.to(tl.float32)
    factor = tl.where(negated, -factor, factor)
    tl.store(result + at, numbers.to(tl.float32) * factor, mask=at < x_numel)


@triton.jit
def bool_with_to(x, result, x_numel, by, negated, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sign = 1 - 2 * negated.to(tl.int32)
    tl.store(result + at, tl.load(x + at, mask=at < x_numel) * by * sign, mask=at < x_numel)


@triton.jit
def called_dtype(x, result, x_numel, by, negated, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sign = tl.float32(1.0) - tl.float32(2.0) * tl.float32(negated)
    tl.store(result + at, tl.load(x + at, mask=at < x_numel) * by * sign, mask=at < x_numel)


@triton.jit
def in_bfloat16(x, result, x_numel, by, negated, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(x + at, mask=at < x_numel).to(tl.bfloat16).to(tl.float32)
    numbers = tl.where(
        numbers == tl.full((BLOCK,), 2.5, tl.bfloat16), 2.5, tl.load(x + at, mask=at < x_numel)
    )
    sign = -1.0 if negated else 1.0
    tl.store(result + at, (numbers + tl.zeros((BLOCK,), tl.bfloat16)) * by * sign, mask=at < x_numel)


@triton.jit
def imported_by_name(x, result, x_numel, by, negated, BLOCK: tl.constexpr):
    at = program_id(0) * BLOCK + arange(0, BLOCK)
    sign = -1.0 if negated else 1.0
    numbers = load(x + at, mask=at < x_numel).to(tl.float32)
    store(result + at, fma(numbers, by * sign, 0.0), mask=at < x_numel)


BRIDGED = [imported_by_name, quoted, float_with_to, bool_with_to, called_dtype, in_bfloat16]


@pytest.mark.every(6)
@pytest.mark.parametrize("kernel", BRIDGED, ids=lambda kernel: kernel.fn.__name__)
def test_what_the_interpreter_lacks_is_bridged(kernel: Any) -> None:
    outcome = outcome_of(scaled(kernel.fn.__name__, kernel))
    assert outcome.status == "passed", outcome.failures


@triton.jit
def by_module(x, result, x_numel, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(x + at, mask=at < x_numel, other=1.0).to(tl.float32)
    found = libdevice.tanh(numbers) + tl.extra.libdevice.fast_expf(numbers) + libdevice.atan2(numbers, 2.0)
    found += rsqrt(numbers * numbers + 1.0) + libdevice.round(libdevice.div_rn(numbers, 3.0))
    tl.store(result + at, tl.where(libdevice.isnan(numbers) != 0, numbers, found), mask=at < x_numel)


@pytest.mark.slow
def test_functions_of_libdevice_are_those_of_torch() -> None:
    @opsmith.operator("interpreted_language::functions")
    def functions(x: Tensor) -> Tensor:
        two = torch.full_like(x, 2)
        near = torch.copysign(((x / 3).abs() + 0.5).floor(), x)
        return x.tanh() + x.exp() + torch.atan2(x, two) + torch.rsqrt(x * x + 1) + near

    functions.samples(lambda make: [(make(4, 5),), (make(7),)])
    functions.kernel(
        "cuda", triton=by_module, grid=lambda x: triton.cdiv(x.numel(), 8), constants={"BLOCK": 8}
    )
    outcome = outcome_of(functions)
    assert outcome.status == "passed", outcome.failures
    with pytest.raises(ValueError, match=r"Did you forget to add @triton\.jit"):  # restored
        tl.extra.cuda.libdevice.tanh(1.0)


@triton.jit
def by_assembler(x, result, x_numel, by, negated, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(x + at, mask=at < x_numel).to(tl.float32)
    same = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [numbers], tl.float32, True, 1)
    sign = -1.0 if negated else 1.0
    tl.store(result + at, same * by * sign, mask=at < x_numel)


@triton.jit
def rare_function(x, result, x_numel, by, negated, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(x + at, mask=at < x_numel).to(tl.float32)
    sign = -1.0 if negated else 1.0
    tl.store(result + at, numbers * by * sign + libdevice.yn(1, numbers) * 0, mask=at < x_numel)


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("kernel", "line", "reason"),
    [
        (by_assembler, 4, "inline_asm not supported in interpreter mode"),
        (rare_function, 5, "Triton's interpreter does not have `libdevice.yn`"),
    ],
    ids=["by_assembler", "rare_function"],
)
def test_a_kernel_that_the_interpreter_cannot_run_is_skipped(kernel: Any, line: int, reason: str) -> None:
    operator = scaled(kernel.fn.__name__, kernel)
    outcome = outcome_of(operator)
    where = f"{__file__}:{kernel.fn.__code__.co_firstlineno + line}"
    assert outcome.status == "skipped"
    cannot = "Triton's interpreter cannot run the kernel: NotImplementedError"
    assert f"calls not interpreted: {cannot}: {reason} at {where}; " in outcome.reason
    with pytest.raises(errors.ToolchainError) as caught:
        operator.specification.kernels[0].function.interpreted(torch.ones(3), 2.0)
    assert caught.value.where == where
    assert caught.value.hint == "check the kernel on a GPU"


@triton.jit
def half_in_libdevice(x, result, x_numel, by, negated, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(x + at, mask=at < x_numel).to(tl.float16)
    sign = -1.0 if negated else 1.0
    tl.store(result + at, libdevice.abs(numbers) * by * sign, mask=at < x_numel)


@pytest.mark.slow
def test_a_kernel_that_triton_refuses_as_well_has_failed() -> None:
    outcome = outcome_of(scaled("half_in_libdevice", half_in_libdevice))
    assert outcome.status == "failed"
    failure = outcome.failures[0]
    assert "`libdevice.abs` takes float32 or float64, not fp16" in failure.message
    assert failure.where == f"{__file__}:{half_in_libdevice.fn.__code__.co_firstlineno + 5}"
