"""linear: against torch's own, and what it refuses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import opsmith
from opsmith.ops import linear


@pytest.mark.parametrize("shape", [(4, 3), (3,), (2, 5, 3), (0, 3)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_as_torch(shape: tuple[int, ...], bias: bool) -> None:
    x = torch.rand(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    given = [x, weight, torch.rand(2, dtype=torch.float64, requires_grad=True)][: 3 if bias else 2]
    result, expected = linear(*given), F.linear(*given)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(
        torch.autograd.grad(result.sin().sum(), given), torch.autograd.grad(expected.sin().sum(), given)
    )


@pytest.mark.parametrize(
    ("shapes", "argument", "expected", "got"),
    [
        (((4, 3), (2, 5)), "weight", "`N M` with M = 3", "[2, 5]"),
        (((4, 3), (3,)), "weight", "`N M`: 2 dimensions", "[3]"),
        (((), (2, 3)), "x", "`... M`: 1 or more dimensions", "[]"),
        (((4, 3), (2, 3), (3,)), "bias", "`N` with N = 2", "[3]"),
        (((4, 3), (2, 3), (1,)), "bias", "`N` with N = 2", "[1]"),
    ],
    ids=["sizes", "weight", "scalar", "bias", "bias_of_one"],
)
def test_refused_shapes(shapes: tuple[tuple[int, ...], ...], argument: str, expected: str, got: str) -> None:
    with pytest.raises(opsmith.errors.ShapeError) as caught:
        linear(*(torch.ones(shape) for shape in shapes))
    assert (caught.value.argument, caught.value.expected, caught.value.got) == (argument, expected, got)


def test_lower_precision_under_autocast() -> None:
    x = torch.rand(4, 3, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = linear(x, torch.rand(2, 3))
    assert result.dtype == torch.bfloat16
    result.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
