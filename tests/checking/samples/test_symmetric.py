"""Functions of symmetric matrices that read one triangle: their derivatives are those among such matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith
from opsmith.checking.effort import EFFORTS
from opsmith.checking.samples.domain import symmetric_labels
from opsmith.checking.subject_kinds import subject_of

SMOOTH = ["gradient", "values", "forward_mode", "second_order"]


def positive(*sizes: int) -> Tensor:
    noise = torch.randn(*sizes, generator=torch.Generator().manual_seed(0))
    return noise @ noise.mT + torch.eye(sizes[-1])


def given() -> list[Any]:
    return [(positive(3, 3),), (positive(2, 4, 4),)]


def logdet(a: Tensor) -> Tensor:
    return 2 * torch.linalg.cholesky(a).diagonal(dim1=-2, dim2=-1).log().sum(-1)


def inverse(grad: Tensor, a: Tensor) -> Tensor:
    return grad[..., None, None] * torch.linalg.inv(a)


class LogDet(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        return logdet(a)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return inverse(grad, *ctx.saved_tensors)


class OfItsTriangle(LogDet):
    """Its gradient is the one by the triangle that is read, as `gradcheck` wants it."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        whole = inverse(grad, *ctx.saved_tensors)
        return 2 * whole.tril() - torch.diag_embed(whole.diagonal(dim1=-2, dim2=-1))


class Spectrum(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        return torch.linalg.eigvalsh(a)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        vectors = torch.linalg.eigh(*ctx.saved_tensors).eigenvectors
        return (vectors * grad[..., None, :]) @ vectors.mT


class Doubled(LogDet):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * inverse(grad, *ctx.saved_tensors)


class WithoutDiagonal(LogDet):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        whole = inverse(grad, *ctx.saved_tensors)
        return whole.tril(-1) + whole.triu(1)


class Hidden(LogDet):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return inverse(grad, ctx.saved_tensors[0].detach())


@pytest.mark.slow
@pytest.mark.every(6)
@pytest.mark.parametrize("effort", ["quick", "default"])
@pytest.mark.parametrize("right", [LogDet, OfItsTriangle, Spectrum])
def test_a_right_gradient_among_symmetric_matrices_passes(right: Any, effort: Any) -> None:
    report = opsmith.check(right, samples=given(), only=SMOOTH, effort=effort)
    assert report.failures == (), str(report)
    assert report.remarks[-1].startswith("derivatives with respect to `a` are taken along symmetric matrices")


@pytest.mark.every(5)
@pytest.mark.parametrize("formula", [None, inverse])
def test_a_reference_that_reads_one_triangle_hides_nothing(formula: Any) -> None:
    operator = opsmith.operator(f"symmetry::logdet_{formula is None}")(logdet)
    if formula is not None:
        operator.gradients(a=formula)
    report = opsmith.check(operator, samples=given(), only=SMOOTH, effort="quick")
    assert report.failures == (), str(report)


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("wrong", "check", "cause"),
    [
        (Doubled, "gradient", "scale"),
        (WithoutDiagonal, "gradient", "region"),
        (Hidden, "second_order", "second-order"),
    ],
)
def test_a_wrong_one_is_found(wrong: Any, check: str, cause: str) -> None:
    failure = opsmith.check(wrong, samples=given(), only=SMOOTH, effort="quick").failures[0]
    assert (failure.property, failure.input, failure.cause) == (check, "a", cause)


class Lowered(Function):
    """Reads all of it."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return a.tril().exp() + a.triu()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Raising(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        if not torch.equal(a, a.mT):
            raise ValueError("a is not symmetric")
        return a.tril()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.tril()


@pytest.mark.parametrize(
    ("function", "samples", "symmetric"),
    [
        (LogDet, given(), {"a"}),
        (Lowered, given(), set()),
        (Raising, given(), set()),
        (LogDet, [(positive(3, 3),), (positive(3, 3) + torch.eye(4)[1:, :3] / 9,)], set()),
        (LogDet, [(positive(3, 3).tril(),)], set()),
    ],
)
def test_it_is_seen_in_every_sample_which_triangle_is_read(
    function: Any, samples: Any, symmetric: set[str]
) -> None:
    subject = subject_of(function, samples, 0, EFFORTS["quick"])
    assert symmetric_labels(subject) == symmetric
