"""The gate of a block, in place, in each dtype and layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from random_layouts import contiguous, strided, transposed
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith import errors
from opsmith.ops import swiglu_

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.every(4)
@pytest.mark.parametrize("layout", [contiguous, transposed, strided])
@pytest.mark.parametrize("shape", [(4, 5), (2, 3, 70), (7,), (0, 3), (300, 128)], ids=str)
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_values(
    dtype: torch.dtype, shape: tuple[int, ...], layout: Callable[[tuple[int, ...], torch.dtype], Tensor]
) -> None:
    for _ in range(2):
        gate, up = layout(shape, dtype), layout(shape, dtype)
        expected = (F.silu(gate.double()) * up.double()).to(dtype)
        assert swiglu_(gate, up) is gate
        assert_close(gate, expected)


def test_halves_of_one_tensor_and_far_numbers() -> None:
    both = torch.tensor([[-1000.0, 1000.0, 2.0, 2.0]])
    gate, up = both.chunk(2, -1)
    swiglu_(gate, up)
    assert both.tolist() == [[0, 2000, 2, 2]]


def test_gradients() -> None:
    given = [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(swiglu_.functional, given)


def test_refused() -> None:
    with pytest.raises(errors.ShapeError):
        swiglu_(torch.ones(2, 3), torch.ones(2, 4))
    x = torch.ones(2)
    with pytest.raises(errors.MutationError, match="shares elements"):
        swiglu_(x, x)


@pytest.mark.slow
def test_check_passes() -> None:
    report = opsmith.check(swiglu_, effort="quick")
    assert report.passed, report
