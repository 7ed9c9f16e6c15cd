"""linear: against torch's own, and what it refuses."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

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
    ("shapes", "message"),
    [
        (((4, 3), (2, 5)), "linear expects x [..., M] and weight [N, M], got [4, 3] and [2, 5]"),
        (((4, 3), (3,)), "linear expects x [..., M] and weight [N, M], got [4, 3] and [3]"),
        (((), (2, 3)), "linear expects x [..., M] and weight [N, M], got [] and [2, 3]"),
        (((4, 3), (2, 3), (3,)), "linear expects bias [N] with N = 2, got [3]"),
        (((4, 3), (2, 3), (1,)), "linear expects bias [N] with N = 2, got [1]"),
    ],
    ids=["sizes", "weight", "scalar", "bias", "bias_of_one"],
)
def test_refused_shapes(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        linear(*(torch.ones(shape) for shape in shapes))


def test_lower_precision_under_autocast() -> None:
    x = torch.rand(4, 3, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = linear(x, torch.rand(2, 3))
    assert result.dtype == torch.bfloat16
    result.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
