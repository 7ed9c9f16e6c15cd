"""Operators whose surrogate gradients are wrong even for surrogates."""

from typing import Any

import torch
from mutants import wrong
from torch import Tensor

import opsmith


def spike(name: str) -> Any:
    @opsmith.operator(f"wrong::{name}")
    def spike(x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)

    spike.samples(lambda make: [(make(3, 4),)])
    return spike


@wrong(
    "surrogate",
    "nonlinear-grad",
    "x",
    "torch adds up gradients before and after an operator, and assumes that each backward is linear",
)
def not_linear() -> Any:
    return spike("not_linear").surrogate_gradients(x=lambda grad, x: grad.sign())


@wrong("surrogate", "nonlinear-grad", "x", "for 1024 times a grad_output")
def clipped_far_out() -> Any:
    return spike("clipped_far_out").surrogate_gradients(x=lambda grad, x: grad.clamp(-50, 50))


@wrong("surrogate", "unknown", "x", "it is not the gradient of the stand-in: at")
def not_the_stand_in() -> Any:
    return spike("not_the_stand_in").surrogate_gradients(
        lambda x: torch.sigmoid(x), x=lambda grad, x: grad * torch.sigmoid(x)
    )


@wrong("layouts", "layout", "x", "is right for a contiguous grad_output and wrong for a grad_output that is")
def surrogate_layout() -> Any:
    return spike("surrogate_layout").surrogate_gradients(
        x=lambda grad, x: torch.as_strided(grad, x.shape, (x.shape[1], 1)) * (x.abs() < 1)
    )


@wrong("surrogate", "shape", "x", "GradientShapeError: wrong::surrogate_shape")
def surrogate_shape() -> Any:
    return spike("surrogate_shape").surrogate_gradients(x=lambda grad: grad[1:])


@wrong(
    "surrogate", "not-exercised", "x", "expected a floating tensor in at least one sample, got torch.int64"
)
def surrogate_never_exercised() -> Any:
    operator = spike("surrogate_never_exercised").surrogate_gradients(x=lambda grad: grad)
    operator.samples(lambda make: [(make.integers(3),)])
    return operator
