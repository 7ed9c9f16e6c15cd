"""Calls that torch.compile cannot trace: they run as they are, and Dynamo traces none of opsmith's code."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors

pytestmark = pytest.mark.compile

_numbers = itertools.count()


class Power(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, by):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        ctx.by = by
        return x**by

    @staticmethod
    def backward(ctx: Any, grad):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return grad * ctx.by * x ** (ctx.by - 1), None


def scaled(x: Tensor, by: float) -> Tensor:
    return x * by


def summed(x: Tensor, y: Tensor) -> Tensor:
    return x + y


@pytest.fixture
def name() -> str:
    return f"untraced::operator_{next(_numbers)}"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch reads it
@pytest.mark.parametrize("inference", [False, True])
def test_a_class_without_types_learns_them_after_the_graph_break(name: str, inference: bool) -> None:
    power = opsmith.adopt(Power, name)
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    with torch.inference_mode(inference):
        result = torch.compile(lambda x: power(x, 2), backend="aot_eager")(x)
    assert result.tolist() == [4.0, 9.0]
    if not inference:
        result.sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [4.0, 6.0]


def test_a_class_without_types_says_in_one_graph_what_declares_them(name: str) -> None:
    power = opsmith.adopt(Power, name)
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="`by` has the wrong type") as raised:
        torch.compile(lambda x: power(x, 2), backend="aot_eager", fullgraph=True)(x)
    assert 'signature="(x: Tensor, n: int) -> Tensor"' in str(raised.value)
    power = opsmith.adopt(Power, f"{name}_declared", signature="(x: Tensor, by: int) -> Tensor")
    assert torch.compile(lambda x: power(x, 2), backend="aot_eager", fullgraph=True)(x).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("reference", "given", "argument"), [(scaled, "two", "by"), (summed, 2, "y"), (summed, "two", "y")]
)
def test_a_wrong_type_is_refused_as_without_torch_compile(
    name: str, reference: Any, given: object, argument: str, inference: bool
) -> None:
    operator = opsmith.operator(name)(reference)
    with torch.inference_mode(inference), pytest.raises(errors.ArgumentError) as raised:
        torch.compile(lambda x: operator(x, given), backend="aot_eager")(torch.ones(2))
    assert (raised.value.operator, raised.value.argument) == (name, argument)


def test_a_number_of_numpy_is_converted(name: str) -> None:
    numpy = pytest.importorskip("numpy")
    operator = opsmith.operator(name)(scaled)
    compiled = torch.compile(lambda x, by: operator(x, by), backend="aot_eager")
    assert compiled(torch.ones(2), numpy.float32(2)).tolist() == [2.0, 2.0]
