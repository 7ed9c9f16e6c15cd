"""exp, mul and add: what the matrix does not hold."""

from __future__ import annotations

import pytest
import torch

from opsmith.ops import add, exp, mul


def test_composed() -> None:
    w, b, x = torch.tensor([[2.0, 3.0]]), torch.tensor([3.0]), torch.tensor([[4.0, 5.0]])
    w.requires_grad_()
    b.requires_grad_()
    result = add(b, torch.sum(mul(w, x)))
    assert result.tolist() == [26.0]
    result.backward()
    assert w.grad is not None
    assert b.grad is not None
    assert w.grad.tolist() == [[4.0, 5.0]]
    assert b.grad.tolist() == [1.0]
    assert x.grad is None


@pytest.mark.parametrize("operator", [mul, add])
def test_types_promote_as_in_torch(operator: object) -> None:
    assert callable(operator)
    whole, half, double = (
        torch.tensor([3]),
        torch.tensor([0.5], dtype=torch.float16),
        torch.tensor([2.0]).double(),
    )
    for x, y in ((whole, half), (half, double), (double, whole), (half, torch.tensor([1j]))):
        left = x.clone().requires_grad_() if x.is_floating_point() else x
        result = operator(left, y)
        torch.testing.assert_close(result.detach(), operator.reference(x, y))  # type: ignore[attr-defined]
        if left.requires_grad:
            (gradient,) = torch.autograd.grad(result, left, torch.ones_like(result))
            assert gradient.dtype == x.dtype


def test_exp_of_whole_numbers() -> None:
    torch.testing.assert_close(exp(torch.tensor([0, 1])), torch.tensor([1.0, torch.e]))


def test_exp_is_computed_in_float32_under_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert exp(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.float32
