"""Gradients that are wrong where an index repeats: the cause is that, and no shift, factor or place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, tensor
from torch.autograd import Function

import opsmith


def class_of(
    forward: Callable[[Tensor, Tensor], Tensor], backward: Callable[[Tensor, Tensor, torch.Size], Tensor]
) -> Any:
    """A class of a tensor and indices, with a backward from the grad_output, the indices and the shape."""

    def own(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return forward(x, index)

    methods = {
        "forward": staticmethod(own),
        "backward": staticmethod(lambda ctx, grad: (backward(grad, *ctx.saved_tensors, ctx.shape), None)),
    }
    return type("Indexed", (Function,), methods)


def rows(x: Tensor, index: Tensor) -> Tensor:
    return x[index]


def gathered(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index)


def sums(x: Tensor, index: Tensor) -> Tensor:
    return x.new_zeros(6, *x.shape[1:]).index_add(0, index, x)


def added(grad: Tensor, index: Tensor, shape: torch.Size) -> Tensor:
    """The right gradient of `rows`."""
    return grad.new_zeros(shape).index_add(0, index.flatten() % shape[0], grad.reshape(-1, *shape[1:]))


def assigned(grad: Tensor, index: Tensor, shape: torch.Size) -> Tensor:
    found = grad.new_zeros(shape)
    found[index] = grad
    return found


def averaged(grad: Tensor, index: Tensor, shape: torch.Size) -> Tensor:
    counts = torch.bincount(index.flatten(), minlength=shape[0]).clamp_min(1)
    return added(grad, index, shape) / counts[:, None]


def scattered(grad: Tensor, index: Tensor, shape: torch.Size) -> Tensor:
    return grad.new_zeros(shape).scatter(1, index, grad)


def divided(grad: Tensor, index: Tensor, shape: torch.Size) -> Tensor:
    return grad[index] / torch.bincount(index)[index][:, None]


def adjacent(grad: Tensor, index: Tensor, shape: torch.Size) -> Tensor:
    """Right for sorted indices, and for distinct ones: adds those that stand side by side."""
    values, inverse = torch.unique_consecutive(index, return_inverse=True)
    found = grad.new_zeros(shape)
    found[values] = grad.new_zeros(len(values), *shape[1:]).index_add(0, inverse, grad)
    return found


def without_negative(grad: Tensor, index: Tensor, shape: torch.Size) -> Tensor:
    return added(grad * (index >= 0)[:, None], index, shape)


def x(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def found(function_class: Any, shape: Sequence[int], *indices: Tensor) -> tuple[str, str]:
    samples = [(x(*shape), index) for index in indices]
    (failure,) = opsmith.check(function_class, samples=samples, only=["gradient"], effort="quick").failures
    return failure.cause, failure.message


SAME, OTHER = tensor([2, 2, 2]), tensor([0, 1, 2])

REPEATED = {
    "rows, all the same index": (class_of(rows, assigned), (4, 3), (SAME, OTHER)),
    "rows, some the same": (class_of(rows, assigned), (4, 3), (tensor([0, 2, 2, 1]), tensor([3, 0, 2, 1]))),
    "rows, distinct ones alone": (class_of(rows, assigned), (5, 3), (tensor([[0, 2], [4, 1]]),)),
    "an average": (class_of(rows, averaged), (5, 3), (tensor([[2, 2], [2, 2]]), tensor([[0, 2], [3, 1]]))),
    "elements of each row": (class_of(gathered, scattered), (2, 5), (tensor([[0, 2], [2, 2]]),)),
    "a sum": (class_of(sums, divided), (4, 3), (tensor([0, 2, 2, 5]),)),
}


@pytest.mark.every(8)
@pytest.mark.parametrize("case", REPEATED)
def test_wrong_where_an_index_repeats(case: str) -> None:
    cause, message = found(*REPEATED[case][:2], *REPEATED[case][2])
    assert cause == "region"
    assert "in `index` occurs more than once, and nowhere else" in message


OTHERWISE = {
    "another sign": (lambda *given: -added(*given), SAME, "sign"),
    "a shift": (lambda *given: added(*given).roll(1, 0), SAME, "shifted"),
    "side by side alone": (adjacent, tensor([2, 0, 2]), "unknown"),
    "a negative index": (without_negative, tensor([-1, -1, 0]), "region"),
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_another_fault_of_indices_is_not_taken_for_it(case: str) -> None:
    backward, index, expected = OTHERWISE[case]
    cause, message = found(class_of(rows, backward), (5, 3), index, OTHER)
    assert cause == expected
    assert "occurs more than once" not in message
