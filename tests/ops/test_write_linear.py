"""A linear map that is written into memory that is there, in each dtype and layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from random_layouts import contiguous, strided, transposed
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.ops import write_linear

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHAPES = [(3, 5, 4), (1, 2, 70), (4, 6, 8), (9, 1, 3), (0, 2, 3), (2, 0, 3), (2, 3, 0), (64, 96, 128)]


def half(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The first columns of a wider tensor, as the gate of a block is."""
    return contiguous((shape[0], 2 * shape[1]), dtype)[:, : shape[1]]


@pytest.mark.every(5)
@pytest.mark.parametrize("layout", [contiguous, transposed, strided, half])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_values(
    dtype: torch.dtype, shape: tuple[int, int, int], layout: Callable[[tuple[int, ...], torch.dtype], Tensor]
) -> None:
    rows, outputs, inputs = shape
    y, x, weight = (layout(each, dtype) for each in ((rows, outputs), (rows, inputs), (outputs, inputs)))
    for _ in range(2):
        assert write_linear(y, x, weight) is None
        right = x.double() @ weight.double().mT
        # Each of K products and sums is rounded to the dtype that sums.
        wide = torch.promote_types(dtype, torch.float32)
        bound = inputs * torch.finfo(wide).eps * (x.double().abs() @ weight.double().abs().mT)
        bound += torch.finfo(dtype).eps * right.abs()
        assert ((y.double() - right).abs() <= bound).all()


def test_the_kernel_takes_any_layout() -> None:
    y, x, weight = (strided(shape, torch.bfloat16) for shape in ((2, 3), (2, 4), (3, 4)))
    assert "kernel for cpu" in write_linear.explain(y, x, weight).forward


def test_gradients() -> None:
    x, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 4), (3, 4)))
    y = torch.zeros(2, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *two: write_linear.functional(y, *two), (x, weight))


def test_refused() -> None:
    with pytest.raises(errors.ShapeError):
        write_linear(torch.ones(2, 3), torch.ones(2, 4), torch.ones(3, 5))
    x = torch.ones(2, 2)
    with pytest.raises(errors.MutationError, match="shares elements"):
        write_linear(x, x, torch.ones(2, 2))


@pytest.mark.slow
def test_check_passes() -> None:
    report = opsmith.check(write_linear, effort="quick")
    assert report.passed, report
