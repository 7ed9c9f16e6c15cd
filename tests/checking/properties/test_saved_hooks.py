"""Backwards that take saved tensors for the very tensors that were saved."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from functions import Square
from torch import Tensor
from torch.autograd import Function

import opsmith

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class ByStrides(Square):
    """It reads the transposition that it saved by the strides that this had."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        turned = x.clone().mT
        ctx.strides = turned.stride()
        ctx.save_for_backward(turned)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (turned,) = ctx.saved_tensors
        return 2 * grad * turned.as_strided(turned.shape, ctx.strides).mT


class ByAddress(Square):
    """It finds what belongs to a saved tensor by its address."""

    known: ClassVar[dict[int, Tensor]] = {}

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        kept = x.clone()
        ctx.save_for_backward(kept)
        ByAddress.known = {kept.data_ptr(): 2 * x}  # of earlier calls, a copy may have the address
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (kept,) = ctx.saved_tensors
        return grad * ByAddress.known[kept.data_ptr()]


def found(function_class: type[Function], *samples: Tensor) -> list[tuple[str, str | None, str]]:
    report = opsmith.check(
        function_class, samples=[(each,) for each in samples], only=["saved_hooks"], effort="quick"
    )
    return [(failure.severity, failure.input, failure.cause) for failure in report.failures]


@pytest.mark.parametrize("x", [X, X.float(), X.mT, X[:, ::2], X[:0], X[0, 0]], ids=lambda x: str(x.stride()))
def test_what_takes_saved_tensors_by_their_numbers_is_right(x: Tensor) -> None:
    assert found(Square, x) == []


def test_saved_tensors_that_are_read_by_other_strides_are_found() -> None:
    assert found(ByStrides, X) == [("error", "x", "unknown")]


def test_saved_tensors_that_are_found_by_their_address_are_found() -> None:
    assert found(ByAddress, X) == [("error", None, "raises")]


def test_the_messages_name_the_hooks() -> None:
    for function_class, words in ((ByStrides, "the gradient of `x` differs"), (ByAddress, "KeyError")):
        report = opsmith.check(function_class, samples=[(X,)], only=["saved_hooks"], effort="quick")
        (failure,) = report.failures
        assert words in failure.message
        assert (
            "where hooks pack the saved tensors (`torch.autograd.graph.saved_tensors_hooks`), as "
            "offloading does"
        ) in failure.message


def test_without_a_gradient_nothing_is_looked_at() -> None:
    @opsmith.operator("saved_hooks::whole")
    def whole(x: Tensor) -> Tensor:
        return x + 1

    report = opsmith.check(whole, samples=[(torch.arange(3),)], only=["saved_hooks"], effort="quick")
    (outcome,) = (each for each in report.outcomes if each.property == "saved_hooks")
    assert (outcome.status, outcome.reason) == ("skipped", "there is nothing to differentiate")
