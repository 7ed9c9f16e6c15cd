"""Inputs that belong together in the samples, buffers without elements, sizes that are equal by chance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def found(checked: Any, *sample: Any, only: list[str]) -> set[tuple[str, str | None, str]]:
    """Property, input and severity of each failure."""
    report = opsmith.check(checked, samples=[sample], only=only)
    return {(each.property, each.input, each.severity) for each in report.failures}


class ByAdjoint(Function):
    """It goes back by the adjoint that the caller passes."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, adjoint: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(adjoint, x)
        return matrix @ x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        adjoint, x = ctx.saved_tensors
        return grad @ x.mT, None, adjoint @ grad


def test_a_gradient_that_is_right_where_two_inputs_belong_together_is_a_warning_elsewhere() -> None:
    matrix = drawn(3, 4)
    report = opsmith.check(
        ByAdjoint, samples=[(matrix, matrix.mT.clone(), drawn(4, 2))], only=["gradient", "values"]
    )
    assert not report.errors, report
    failure = next(each for each in report.failures if (each.property, each.input) == ("gradient", "x"))
    assert (failure.severity, failure.given) == ("warning", "strained")
    assert "`adjoint` and `matrix` depend on each other in your samples" in failure.message


class SumsToOne(Function):
    """Its gradient takes the sum of the weights for one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights)
        return -(weights * x.log_softmax(-1)).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weights = ctx.saved_tensors
        return grad[..., None] * (x.softmax(-1) - weights), -grad[..., None] * x.log_softmax(-1)


def test_a_gradient_that_is_right_for_weights_that_sum_to_one_is_a_warning_for_others() -> None:
    sample = (drawn(3, 4), drawn(3, 4, seed=1).softmax(-1))
    report = opsmith.check(SumsToOne, samples=[sample], only=["gradient", "values"])
    (failure,) = report.failures
    assert (failure.property, failure.input, failure.severity) == ("values", "x", "warning")
    assert (
        "`weights` holds 0 or -0, and no longer sums to one, although it sums to one in every sample: "
        in failure.message
    )


class ResizesItsBuffer(Function):
    """It writes its gradient into a buffer that it resizes first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.buffer = buffer
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return torch.mul(grad, x.exp(), out=ctx.buffer.resize_as_(x)).clone(), None


def test_a_buffer_without_elements_has_no_gradient_and_may_be_resized() -> None:
    sample = drawn(3, 4), torch.zeros(0, dtype=torch.float64)
    report = opsmith.check(ResizesItsBuffer, samples=[sample], only=["gradient", "effects", "state"])
    assert not report.errors, report
    notes = " ".join(note for outcome in report.outcomes for note in outcome.notes)
    assert "`buffer` has no elements: its gradient has no elements to compare" in notes


class WideBackward(Function):
    """Its backward multiplies by a matrix in float32 whatever comes in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.cumsum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        size, dtype = grad.shape[-1], torch.promote_types(grad.dtype, torch.float32)
        return grad @ torch.ones(size, size, dtype=dtype).tril()


def test_a_backward_that_raises_in_half_precision_alone_is_an_error() -> None:
    (failure,) = opsmith.check(WideBackward, samples=[(drawn(3, 4),)], only=["gradient"]).failures
    assert (failure.cause, failure.severity, failure.dtypes) == ("raises", "error", ("bfloat16", "float16"))


class ZerosWhereItFails(Function):
    """It returns zeros where the solver raises, as in bfloat16."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, b: Tensor) -> Tensor:
        try:
            return torch.linalg.solve(matrix, b)
        except RuntimeError:
            return torch.zeros_like(b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError


def test_a_result_in_half_precision_does_not_excuse_itself() -> None:
    sample = drawn(3, 3) + 3 * torch.eye(3, dtype=torch.float64), drawn(3, 2)
    (failure,) = opsmith.check(ZerosWhereItFails, samples=[sample], only=["forward"]).failures
    assert (failure.cause, failure.severity) == ("kernel-mismatch", "error")
    assert {*failure.dtypes} == {"bfloat16", "float16"}


def test_a_jump_in_half_precision_is_not_judged() -> None:
    class Steps(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return (40 * x).floor()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return torch.zeros_like(grad)

    report = opsmith.check(Steps, samples=[(drawn(30),)], only=["forward"])
    assert not report.failures, report


class OneAngle(Function):
    """It takes one angle for all rows, or one for each; the gradient sums over all rows."""

    @staticmethod
    def forward(ctx: Any, angle: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(angle, x)
        return x * angle.cos()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        angle, x = ctx.saved_tensors
        return (-grad * x * angle.sin()).sum().expand_as(angle), grad * angle.cos()


class SquarePlanes(Function):
    """Its backward divides a flat place by the height."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        largest, at = x.flatten(-2).max(-1)
        ctx.save_for_backward(at)
        ctx.shape = x.shape
        return largest

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (at,) = ctx.saved_tensors
        planes, height, _ = ctx.shape
        row, column = (at // height).clamp(max=height - 1), at % height
        return grad.new_zeros(ctx.shape).index_put((torch.arange(planes), row, column), grad)


@pytest.mark.parametrize(
    ("function", "input", "sample"),
    [(OneAngle, "angle", (drawn(1, 1), drawn(3, 4))), (SquarePlanes, "x", (drawn(5, 3, 3),))],
)
def test_a_size_of_one_grows_and_equal_sizes_come_apart(function: Any, input: str, sample: Any) -> None:
    assert found(function, *sample, only=["gradient"]) == {("gradient", input, "error")}


def test_a_square_matrix_of_integers_may_come_apart() -> None:
    def taken(x: Tensor, index: Tensor) -> Tensor:
        return x[index]

    operator = opsmith.operator("ties::taken")(taken)
    index = torch.tensor([[0, 1], [2, 0]])
    report = opsmith.check(operator, samples=[(drawn(3), index)], only=["forward", "gradient"])
    assert not report.failures, report
    assert any("index [2, 3]" in each or "index [3, 2]" in each for each in report.inputs)


def test_a_matrix_that_must_be_square_is_no_fault() -> None:
    def inverse(matrix: Tensor) -> Tensor:
        return matrix.inverse()

    operator = opsmith.operator("ties::inverse")(inverse)
    operator.gradients(matrix=lambda grad, result: -result.mT @ grad @ result.mT)
    sample = drawn(3, 3) + 3 * torch.eye(3, dtype=torch.float64)
    assert not found(operator, sample, only=["forward", "gradient"])


class FlooredRoot(Function):
    """Adds a small tensor in its backward, to be finite at zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, floor: Tensor) -> Tensor:
        root = x.sqrt()
        ctx.save_for_backward(root, floor)
        return root

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        root, floor = ctx.saved_tensors
        return grad / (2 * root + floor), None


class DampedSolve(Function):
    """Solves another system in its backward, where a number says so."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, right: Tensor, damping: float) -> Tensor:
        ctx.damping = damping
        solution = torch.linalg.solve(matrix, right)
        ctx.save_for_backward(matrix, solution)
        return solution

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        matrix, solution = ctx.saved_tensors
        if ctx.damping > 0:
            matrix = matrix + ctx.damping * torch.eye(len(matrix), dtype=matrix.dtype)
        by_right = torch.linalg.solve(matrix.mT, grad)
        return -by_right @ solution.mT, by_right, None


class Divides(Function):
    """Leaves a divisor that results depend on out of its backward where it is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        return grad * torch.where(scale == 0, 1.0, scale), grad * x


MATRIX = torch.eye(3, dtype=torch.float64) + 0.2 * drawn(3, 3)


@pytest.mark.parametrize(
    ("function", "sample", "severities"),
    [
        (FlooredRoot, (drawn(4, 3).abs() + 0.5, torch.full((3,), 1e-14)), {"warning"}),
        (DampedSolve, (MATRIX, drawn(3, 2), 0.0), {"warning"}),
        (Divides, (drawn(4, 3), drawn(4, 3, seed=1)), {"error"}),
    ],
)
def test_a_gradient_at_another_value_of_a_setting_is_a_warning(
    function: Any, sample: Any, severities: set[str]
) -> None:
    report = opsmith.check(function, samples=[sample], only=["gradient", "values"])
    assert {each.severity for each in report.failures} == severities, str(report)
    words = "which may be a setting of the backward"
    assert all((words in each.message) == (each.severity == "warning") for each in report.failures)
