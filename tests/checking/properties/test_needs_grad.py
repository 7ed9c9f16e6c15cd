"""A backward that raises for some choices of the inputs that require a gradient, and not for others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith


class Crossed(Function):
    """Keeps each argument for the gradient that does not need it."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        by_x, by_weight = ctx.needs_input_grad
        ctx.save_for_backward(x if by_x else None, weight if by_weight else None)
        return x @ weight.mT

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = ctx.saved_tensors
        by_x = grad @ weight if ctx.needs_input_grad[0] else None
        by_weight = grad.mT @ x if ctx.needs_input_grad[1] else None
        return by_x, by_weight


SAMPLES = [
    [(torch.rand(3, 4), torch.rand(3, 4))],
    [(torch.rand(3, 4), torch.rand(5, 4)), (torch.rand(2, 3), torch.rand(4, 3))],
]


@pytest.mark.every(8)
@pytest.mark.parametrize("samples", SAMPLES, ids=["one", "sizes"])
@pytest.mark.parametrize("effort", ["quick", "default"])
def test_what_raises_says_for_which_inputs(samples: Any, effort: Any) -> None:
    report = opsmith.check(Crossed, samples=samples, only=["gradient", "second_order"], effort=effort)
    x, weight, second = report.failures
    both = "is right when `x` and `weight` require a gradient"
    for failure, name, line in (x, "x", "by_x = grad @"), (weight, "weight", "by_weight = grad.mT @"):
        assert (failure.property, failure.input, failure.cause) == ("gradient", name, "raises")
        words = f"the backward raises when `{name}` alone requires a gradient, and {both}"
        assert failure.message.startswith("TypeError: unsupported operand")
        assert failure.message.endswith(f"; {words}")
        assert failure.evidence["also fits"] == {"input-needs-grad": words}
        assert "right on" not in failure.evidence
        assert failure.evidence["sample"].startswith("sample 0 ")
        path, _, number = str(failure.where).rpartition(":")
        with open(path, encoding="utf-8") as file:
            assert line in file.read().splitlines()[int(number) - 1]
        assert failure.replay is not None
        assert "samples" not in failure.replay
        with pytest.raises(TypeError, match="unsupported operand"):
            exec(failure.replay, {"__name__": "replay"})
    assert (second.property, second.follows) == ("second_order", "gradient")


class DoublesBesideX(Function):
    """Its gradient of `a` is twice the right one where `x` requires one, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, a, b)
        return x * a * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, a, b = ctx.saved_tensors
        return grad * a * b, grad * x * b * (2 if ctx.needs_input_grad[0] else 1), grad * x * a


def test_the_smallest_choices_of_inputs_are_named() -> None:
    samples = [tuple(torch.rand(3) for _ in range(3))]
    report = opsmith.check(DoublesBesideX, samples=samples, only=["gradient"])
    (failure,) = report.errors
    wrong, right = "`x` and `a` require a gradient", "`a` alone requires a gradient"
    assert f"it is wrong when {wrong}, and right when {right}" in failure.message
