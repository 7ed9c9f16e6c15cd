"""What holds of one input in every sample, as symmetry, in derived inputs and where special values stand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith
from opsmith.checking.effort import EFFORTS
from opsmith.checking.samples.forms import placed
from opsmith.checking.samples.special_values import SpecialCall, ValueGroup
from opsmith.checking.subject import Subject
from opsmith.checking.subject_kinds import subject_of


def drawn(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def definite(*sizes: int) -> Tensor:
    noise = drawn(*sizes)
    return noise @ noise.mT + torch.eye(sizes[-1], dtype=torch.float64)


def symmetric(*sizes: int) -> Tensor:
    return drawn(*sizes) + drawn(*sizes).mT


class Energy(Function):
    """`x a x` of each row; the gradient by `x` is twice `x a`, as `a` is symmetric."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor) -> Tensor:
        ctx.save_for_backward(x, a)
        return (x * (x @ a)).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, a = ctx.saved_tensors
        g = grad.unsqueeze(-1)
        return 2 * g * (x @ a), x.mT @ (g * x)


class DiagonalEnergy(Energy):
    """A gradient that takes a zero for the mark of a matrix that is diagonal."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        by_x, by_a = Energy.backward(ctx, grad)
        return by_x * (0.5 if bool((ctx.saved_tensors[1] == 0).any()) else 1.0), by_a


class Solved(Function):
    """The solution of `a y = b`; the backward solves with `a` in place of its transpose."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        y: Tensor = torch.linalg.solve(a, b)
        ctx.save_for_backward(a, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, y = ctx.saved_tensors
        back = torch.linalg.solve(a, grad)
        return -back @ y.mT, back


CALLS: dict[Any, list[Any]] = {
    Energy: [(drawn(2, 3, 4), symmetric(4, 4)), (drawn(5, 3), symmetric(3, 3))],
    Solved: [(definite(2, 3, 3), drawn(2, 3, 2)), (definite(1, 4, 4), drawn(1, 4, 1))],
}


@pytest.mark.parametrize("function", CALLS, ids=lambda each: each.__name__)
def test_special_values_stand_in_both_triangles(function: Any) -> None:
    report = opsmith.check(function, samples=CALLS[function], only=["values"], effort="quick")
    assert not report.failures, report


def test_a_gradient_that_is_wrong_at_zeros_of_a_symmetric_matrix_is_found() -> None:
    report = opsmith.check(DiagonalEnergy, samples=CALLS[Energy], only=["values"], effort="quick")
    (failure,) = [each for each in report.failures if each.input == "x"]
    assert failure.severity == "error"
    assert "where `a` holds -0 or 0:" in failure.message


def subject(function: Any, *samples: Any) -> Subject:
    return subject_of(function, samples, 0, EFFORTS["quick"])


def test_a_special_value_that_no_definite_matrix_holds_is_left_out() -> None:
    checked = subject(Solved, *CALLS[Solved])
    a = CALLS[Solved][0][0]
    made, left = placed(checked, "a", a, {0: -1.0})
    assert not left
    made, left = placed(checked, "a", a, {1: -9.0})
    assert left == {1: -9.0, 3: -9.0}
    assert torch.equal(made, made.mT)
    assert bool((torch.linalg.eigvalsh(made) > 0).all())
    assert placed(subject(Energy, *CALLS[Energy]), "a", symmetric(4, 4), {0: -1.0})[1] == {0: -1.0}


def test_no_row_of_a_definite_matrix_is_zero() -> None:
    zeros = ValueGroup("nothing but zeros", (0.0,), everywhere=True)
    for function, stands in ((Solved, False), (Energy, True)):
        checked, argnum = subject(function, *CALLS[function]), int(function is Energy)
        call = SpecialCall(checked, checked.samples[0], "values", argnum=argnum, group=zeros)
        assert (call.placed(dict.fromkeys(range(3), 0.0)) is not None) == stands


def test_of_two_special_values_at_mirrored_places_one_stands() -> None:
    _, left = placed(subject(Energy, *CALLS[Energy]), "a", symmetric(4, 4), {1: 3.0, 4: 5.0})
    assert left == {1: 5.0, 4: 5.0}


def test_matrices_that_chance_makes_symmetric_have_no_form() -> None:
    for a in (torch.eye(3), torch.ones(3, 3), drawn(3, 3)):
        checked = subject(Energy, (drawn(2, 3), a.double()))
        assert placed(checked, "a", a, {1: 3.0})[1] == {1: 3.0}
