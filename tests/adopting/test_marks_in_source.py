"""Arguments that a class marks as dirty are read from its source, before any call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dirty_classes import mark, numbers
from torch import Tensor
from torch.autograd import Function

import opsmith


class ByFunction(Function):
    """Another function marks what it writes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mark(ctx, x, True)
        return x.neg_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -grad


class OfTheClass(ByFunction):
    """Its forward is a method of the class."""

    @classmethod
    def forward(cls, ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.mark_dirty(x)
        return x.neg_()


class ByAnotherName(ByFunction):
    """It returns what it writes under another name, beside a new tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        y, total = x.neg_(), x.sum()
        ctx.mark_dirty(y)
        return y, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor, total: Tensor) -> Any:
        return -grad - total


class InSetupContext(Function):
    """Its `setup_context` has other names than its forward."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Any:
        return x.neg_(), y.neg_()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        first, second = inputs
        ctx.mark_dirty(first, second)

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Any:
        return -first, -second


class AllInputs(InSetupContext):
    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_dirty(*inputs)


WRITTEN: dict[type[Function], str] = {
    ByFunction: "(Tensor(a!) x) -> Tensor(a!)>",
    OfTheClass: "(Tensor(a!) x) -> Tensor(a!)>",
    ByAnotherName: "(Tensor(a!) x) -> Tensor>",
    InSetupContext: "(Tensor(a!) x, Tensor(b!) y) -> ()>",
    AllInputs: "(Tensor(a!) x, Tensor(b!) y) -> ()>",
}


@pytest.mark.parametrize("function_class", WRITTEN, ids=lambda each: each.__name__)
def test_it_is_written_in_the_first_call_as_apply_writes_it(function_class: Any) -> None:
    operator = opsmith.adopt(function_class, f"marks_in_source::{function_class.__name__.lower()}")
    assert WRITTEN[function_class] in str(operator)
    given = [numbers(3) for _ in operator.specification.schema.arguments]
    results, applied = operator(*given), function_class.apply(*[numbers(3) for _ in given])
    results, applied = (each if isinstance(each, tuple) else (each,) for each in (results, applied))
    for result, expected in zip(results, applied, strict=True):
        assert torch.equal(result, expected)
    assert [each is own for each, own in zip(results, given, strict=False)] == [True] * len(given)
