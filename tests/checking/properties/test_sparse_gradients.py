"""A gradient may be sparse, as that of an embedding's table: torch takes it, and so does the check."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith


class Rows(Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, at: Tensor) -> Tensor:
        ctx.save_for_backward(at)
        ctx.shape = table.shape
        return table[at]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (at,) = ctx.saved_tensors
        return torch.sparse_coo_tensor(at[None], grad, ctx.shape), None


class DoubledRows(Rows):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Rows.backward(ctx, 2 * grad)


def samples() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(5, 3, generator=generator), torch.tensor([0, 2, 2, 4])),
        (torch.randn(4, 2, generator=generator), torch.tensor([3, 1])),
    ]


@pytest.mark.every(5)
@pytest.mark.parametrize("effort", ["quick", "default"])
def test_a_right_one_passes(effort: Any) -> None:
    skip = ["compile", "export"]
    report = opsmith.check(Rows, samples=samples(), effort=effort, skip=skip)
    assert report.failures == (), str(report)
    assert report.passed_as_asked


def test_a_wrong_one_is_found() -> None:
    failure = opsmith.check(DoubledRows, samples=samples(), effort="quick").failures[0]
    assert (failure.property, failure.input, failure.cause) == ("gradient", "table", "scale")
    assert "it is the right tensor times 2" in failure.message


def test_zeros_that_torch_has_not_written_are_zeros() -> None:
    @opsmith.operator("sparse_gradients::sign")
    def sign(x: Tensor) -> Tensor:
        return torch.sgn(x)  # torch's gradient of it has no memory

    report = opsmith.check(
        sign, samples=[(torch.tensor([1.0, -2.0, 3.0]),)], only=["gradient", "memory", "effects"]
    )
    assert not report.failures, report
