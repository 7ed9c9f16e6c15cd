"""What an author writes on purpose: the check says where it differs, and calls it no error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

import opsmith


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradient_of(checked: Any, *samples: Any, only: tuple[str, ...] = ("gradient",)) -> opsmith.Report:
    return opsmith.check(checked, samples=list(samples), only=list(only), effort="quick")


class DoublesInFloat32(Function):
    """In float32 alone its gradient is twice the right one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (2 if grad.dtype == torch.float32 else 1)


RIGHT = "in float64 it is right, and in float32 it is not"


def test_float64_is_called_right_where_it_is() -> None:
    (failure,) = gradient_of(DoublesInFloat32, (drawn(3, 4),)).errors
    assert failure.message.endswith(RIGHT)


class RaisesInFloat64(DoublesInFloat32):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * torch.eye(len(grad)) @ grad


class TakesFloat32(DoublesInFloat32):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.eye(len(x)) @ x


def test_float64_is_not_called_right_where_it_raises_or_is_cast() -> None:
    for checked in (RaisesInFloat64, TakesFloat32):
        report = gradient_of(checked, (drawn(3, 4),))
        wrong = [each for each in report.errors if each.cause == "scale"]
        assert len(wrong) == 1, report
        assert "float64" not in wrong[0].message
