"""Operators that the tests of pages share."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor

import opsmith
from opsmith.checking import Failure, Outcome, Report


@opsmith.operator("paged::affine", shapes="x: B M, weight: N M, bias: N -> B N", results=("y",))
def affine(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
    """Compute scale (x Wt) + b, <script>alert('x')</script>."""
    y = scale * (x @ weight.mT)
    return y if bias is None else y + bias


affine.gradients(
    x=lambda grad, weight, scale: scale * grad @ weight, weight=lambda grad, x, scale: scale * grad.mT @ x
)


def computed(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
    return affine.reference(x, weight, bias, scale=scale)


affine.kernel("cpu", computed, dtypes=[torch.float32])


@affine.samples
def affine_samples(make: opsmith.Make) -> Any:
    yield make(4, 3), make(2, 3), make(2)


@opsmith.operator("paged::plain")
def plain(x: Tensor) -> Tensor:
    return x.exp() * x


plain.samples(lambda make: [(make(5),)])


@opsmith.operator("paged::bare")
def bare(x: Tensor) -> Tensor:
    return x * x


@opsmith.operator("paged::raising")
def raising(x: Tensor) -> Tensor:
    raise ValueError("no such thing")


raising.samples(lambda make: [(make(3),)])


@opsmith.operator("paged::sorted", opaque=True)
def in_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(numpy.sort(x.numpy()))


in_numpy.fake(torch.empty_like)


@opsmith.operator("paged::step")
def step(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype)


step.surrogate_gradients(x=lambda grad, x: grad / (1 + x.abs()) ** 2)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


double = opsmith.adopt(Double, "paged::double")

FAILURE = Failure(
    "gradient",
    "weight",
    "transposed",
    "the gradient of `weight` is the transpose of the right tensor",
    "operators.py:12",
    {"error": 3e-16},
    "boom()",
    dtypes=("float64",),
)


def failed(operator: opsmith.Operator[..., Any]) -> Report:
    """A report with a failure, which no check has to find first."""
    both = ("float64", "float32")
    outcomes = (
        Outcome("forward", "passed", dtypes=both),
        Outcome("gradient", "failed", failures=(FAILURE,), dtypes=both),
        Outcome("compile", "skipped", "the effort is `quick`"),
    )
    return Report(operator.name, outcomes, seed=3)


def passed(operator: opsmith.Operator[..., Any]) -> Report:
    """A report without one."""
    return Report(operator.name, (Outcome("forward", "passed"), Outcome("gradient", "passed")), seed=0)
