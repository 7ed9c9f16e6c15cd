"""`check` holds kernels in Triton to the reference, in Triton's interpreter, and finds what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.checking.effort import EFFORTS
from opsmith.kernels.triton.interpreter import missing_interpreter
from opsmith.kernels.triton.kernel import TritonKernel

triton = pytest.importorskip("triton", reason="Triton is not installed: no part of a torch for the CPU")

import triton.language as tl  # noqa: E402

pytestmark = pytest.mark.skipif(missing_interpreter() is not None, reason=str(missing_interpreter()))


def outcome_of(operator: Any, **words: Any) -> Any:
    report = opsmith.check(operator, only=["triton"], **{"effort": "quick", **words})
    return next(each for each in report.outcomes if each.property == "triton")


def row_sums(name: str, function: Any, **words: Any) -> Any:
    @opsmith.operator(f"triton_property::{name}")
    def sums(x: Tensor) -> Tensor:
        return x.sum(1)

    sums.samples(lambda make: [(make(3, 5),)])
    given = {"grid": lambda x: x.shape[0], "constants": {"BLOCK": 256}, **words}
    return sums.kernel("cuda", triton=function, **given)


@triton.jit
def right(x, result, x_size_1, x_stride_0, x_stride_1, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    at = tl.program_id(0) * x_stride_0 + column * x_stride_1
    numbers = tl.load(x + at, mask=column < x_size_1, other=0.0).to(tl.float32)
    tl.store(result + tl.program_id(0), tl.sum(numbers, 0))


@pytest.mark.slow
def test_a_right_kernel_passes_and_says_how_it_ran() -> None:
    outcome = outcome_of(row_sums("right", right))
    assert outcome.status == "passed"
    [note] = outcome.notes
    assert note.startswith("interpreted on the CPU, not on a GPU: ")
    assert note.endswith(" calls in float32, bfloat16, float16, bfloat16 computed in float32")


@triton.jit
def unmasked(x, result, x_size_1, x_stride_0, x_stride_1, BLOCK: tl.constexpr):
    column = tl.arange(0, 4)
    at = tl.program_id(0) * x_stride_0 + column * x_stride_1
    tl.store(result + tl.program_id(0), tl.sum(tl.load(x + at, mask=column < x_size_1, other=0.0), 0))


@triton.jit
def row_stride_alone(x, result, x_size_1, x_stride_0, x_stride_1, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    at = tl.program_id(0) * x_stride_0 + column
    numbers = tl.load(x + at, mask=column < x_size_1, other=0.0)
    tl.store(result + tl.program_id(0), tl.sum(numbers.to(tl.float32), 0))


@triton.jit
def in_half(x, result, x_size_1, x_stride_0, x_stride_1, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    at = tl.program_id(0) * x_stride_0 + column * x_stride_1
    numbers = tl.load(x + at, mask=column < x_size_1, other=0.0)
    tl.store(result + tl.program_id(0), tl.sum(numbers.to(tl.float16), 0))


@pytest.mark.slow
@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (unmasked, "kernel-mismatch"),  # of rows longer than the author's
        (row_stride_alone, "kernel-mismatch"),  # in layouts that are not contiguous
        (in_half, "precision"),
    ],
    ids=["unmasked", "row_stride_alone", "in_half"],
)
def test_a_wrong_kernel_is_found(function: Any, cause: str) -> None:
    outcome = outcome_of(row_sums(function.fn.__name__, function))
    [failure, *_] = [each for each in outcome.failures if each.cause == cause]
    assert failure.property == "triton"
    assert failure.severity == ("warning" if cause == "precision" else "error")
    assert "from the kernel in Triton, interpreted," in failure.message
    assert failure.where == f"{__file__}:{function.fn.__code__.co_firstlineno}"


@pytest.mark.slow
def test_a_wrong_kernel_fails_the_whole_check() -> None:
    asked = ["forward", "gradient", "triton"]
    assert opsmith.check(row_sums("whole_right", right), effort="quick", only=asked).passed
    assert not opsmith.check(row_sums("whole", row_stride_alone), effort="quick", only=asked).passed


def test_a_float_in_32_bits_is_found_where_float64_is_declared() -> None:
    @triton.jit
    def narrow(x, result, by):  # type: ignore[no-untyped-def]
        tl.store(result + tl.program_id(0), tl.load(x + tl.program_id(0)) * by)

    @opsmith.operator("triton_property::narrow")
    def scaled(x: Tensor, by: float) -> Tensor:
        return x * by

    scaled.samples(lambda make: [(make(3), 0.1)])
    scaled.kernel("cuda", triton=narrow, grid=lambda x: x.numel(), dtypes=[torch.float32, torch.float64])
    outcome = outcome_of(scaled)
    assert {"float64" in str(each.evidence["sample"]) for each in outcome.failures} == {True}


@pytest.mark.slow
def test_a_kernel_that_writes_into_its_argument_is_found() -> None:
    @triton.jit
    def writing(x, result, x_size_1, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * x_size_1 + tl.arange(0, BLOCK)
        there = tl.arange(0, BLOCK) < x_size_1
        numbers = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        tl.store(result + tl.program_id(0), tl.sum(numbers, 0))
        tl.store(x + at, numbers * 2, mask=there)

    outcome = outcome_of(row_sums("writing", writing))
    assert "mutates-input" in {failure.cause for failure in outcome.failures}
    dtypes = {word for each in outcome.failures for word in str(each.evidence["sample"]).split()}
    assert "float32" in dtypes


@pytest.mark.slow
def test_a_kernel_that_raises_is_found_at_its_line() -> None:
    @triton.jit
    def raising(x, result, x_size_1, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        column = tl.arange(0, BLOCK)
        numbers = tl.load(x + column, mask=column < x_size_1)
        tl.store(result, tl.sum(numbers + tl.arange(0, 2 * BLOCK), 0))

    outcome = outcome_of(row_sums("raising", raising))
    assert outcome.status == "failed"
    assert outcome.failures[0].where == f"{__file__}:{raising.fn.__code__.co_firstlineno + 4}"
    assert "the Triton kernel raised in the interpreter" in outcome.failures[0].message


def test_a_kernel_that_takes_none_of_the_samples_is_told() -> None:
    @triton.jit
    def cubes(x, result, x_size_2):  # type: ignore[no-untyped-def]
        tl.store(result, tl.load(x))

    outcome = outcome_of(row_sums("cubes", cubes, constants={}))
    [failure] = outcome.failures
    assert failure.cause == "not-exercised"
    assert "`x` has 2 dimensions, but the kernel takes 3" in failure.message


def test_calls_with_too_many_programs_are_left_out_and_told() -> None:
    @triton.jit
    def one_by_one(x, result):  # type: ignore[no-untyped-def]
        at = tl.program_id(0)
        tl.store(result + at, tl.load(x + at))

    @opsmith.operator("triton_property::one_by_one")
    def copied(x: Tensor) -> Tensor:
        return x.clone()

    many = EFFORTS["quick"].call_programs + 1
    copied.samples(lambda make: [(make(4),), (make(many),)])
    copied.kernel("cuda", triton=one_by_one, grid=lambda x: x.numel())
    outcome = outcome_of(copied)
    assert outcome.status == "passed"
    assert any("too many programs for a check" in note for note in outcome.notes)


@pytest.mark.slow
def test_a_kernel_of_which_some_calls_ran_is_unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    programs, calls = TritonKernel.programs, []

    def of_some(kernel: TritonKernel, values: Any) -> int:
        calls.append(values)
        if len(calls) == 2:
            raise errors.ToolchainError("the interpreter does not run it", got="an operation", hint="none")
        return programs(kernel, values)

    monkeypatch.setattr(TritonKernel, "programs", of_some)
    report = opsmith.check(row_sums("partly", right), only=["triton"], effort="quick")
    (outcome,) = [each for each in report.outcomes if each.property == "triton"]
    assert outcome.status == "skipped"
    assert outcome.reason.startswith("1 call not interpreted: the interpreter does not run it: an operation")
    assert any("interpreted on the CPU, not on a GPU" in note for note in outcome.notes)
    assert any("Triton" in each for each in report.unverified)
    assert not report.errors
