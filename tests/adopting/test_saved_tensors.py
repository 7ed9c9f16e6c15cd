"""Saved tensors of adopted classes: hooks pack and unpack each once, as under `apply`, in every call."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from saving_classes import LIKE_APPLY, MORE, MarkedDirty, OnceDifferentiable, formula
from torch import Tensor, nn
from torch.autograd import Function
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import opsmith
from opsmith import errors

NUMBER = iter(range(10_000))
CLASSES = (*LIKE_APPLY, *MORE)


def adopted(function_class: type[Function]) -> Any:
    return opsmith.adopt(function_class, f"saved_tensors::case_{next(NUMBER)}")


def values(*, needs_w: bool = True) -> tuple[Tensor, Tensor]:
    x = torch.linspace(0.5, 1, 3, dtype=torch.float64).requires_grad_()
    return x, torch.linspace(0.2, 0.9, 3, dtype=torch.float64).requires_grad_(needs_w)


def one(function_class: type[Function], call: Callable[..., Any], x: Tensor, w: Tensor) -> Tensor:
    """The first result of a call; a copy of what a class writes over."""
    result: Any = call(x.clone() if function_class is MarkedDirty else x, w)
    return result[0] if isinstance(result, tuple) else result


@contextmanager
def counting(packed: list[Tensor], unpacked: list[Tensor]) -> Generator[None]:
    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.detach())
        return packed[-1]

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def hooked(
    function_class: type[Function], call: Callable[..., Any], order: int, *, needs_w: bool
) -> tuple[list[Tensor], int]:
    """What is packed by a call, and how often its backward unpacks."""
    packed: list[Tensor] = []
    unpacked: list[Tensor] = []
    x, w = values(needs_w=needs_w)
    with counting(packed, unpacked):
        y = one(function_class, call, x, w)
    torch.autograd.grad(y.sum(), x, create_graph=order == 2)
    return packed, len(unpacked)


@pytest.mark.every(8)
@pytest.mark.parametrize("needs_w", [True, False], ids=["both", "x alone"])
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("function_class", CLASSES, ids=lambda each: each.__name__)
def test_each_saved_tensor_is_packed_and_unpacked_once(
    function_class: type[Function], order: int, needs_w: bool
) -> None:
    operator = adopted(function_class)
    packed, unpacked = hooked(function_class, function_class.apply, order, needs_w=needs_w)
    for call in range(4):  # the first ones find the fast path
        found, times = hooked(function_class, operator, order, needs_w=needs_w)
        if function_class in MORE:
            assert (len(found), times) == (MORE[function_class],) * 2, f"call {call}"
            packed = packed if call else found
        else:
            assert times == unpacked, f"call {call}"
        assert_close(found, packed, msg=f"call {call}")


def differentiated_twice(f: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    (first,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    return [first.detach(), *torch.autograd.grad((first + 0 * x).sum(), x)]  # a class may be linear in x


def on_cpu(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return f(x)


REGIONS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "checkpoint": lambda f, x: checkpoint(f, x, use_reentrant=False),
    "without early stop": lambda f, x: checkpoint(f, x, use_reentrant=False, early_stop=False),
    "save_on_cpu": on_cpu,
    "save_on_cpu around checkpoint": lambda f, x: on_cpu(lambda x: checkpoint(f, x, use_reentrant=False), x),
    "checkpoint around save_on_cpu": lambda f, x: checkpoint(lambda x: on_cpu(f, x), x, use_reentrant=False),
    "checkpoint in checkpoint": lambda f, x: checkpoint(
        lambda x: checkpoint(f, x, use_reentrant=False), x, use_reentrant=False
    ),
}


@pytest.mark.every(8)
@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("function_class", CLASSES, ids=lambda each: each.__name__)
def test_double_backward_in_regions_with_hooks(function_class: type[Function], region: str) -> None:
    operator = adopted(function_class)

    def twice(x: Tensor) -> Tensor:
        return one(function_class, operator, one(function_class, operator, x, w), w)

    x, w = values()
    right = differentiated_twice(lambda x: formula(function_class, formula(function_class, x, w), w), x)
    for _ in range(3):  # the first call of an operator is checked and the others are not
        if function_class is OnceDifferentiable:
            with pytest.raises(errors.TransformError, match="once_differentiable"):
                differentiated_twice(lambda x: REGIONS[region](twice, x), x)
            y = REGIONS[region](twice, x)
            assert_close(torch.autograd.grad(y.sum(), x)[0], right[0])
        else:
            assert_close(differentiated_twice(lambda x: REGIONS[region](twice, x), x), right)


class Applying(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 2, None


class Slotted:
    __slots__ = ("model",)

    def __init__(self, model: nn.Module) -> None:
        self.model = model


OBJECTS: dict[str, Callable[[nn.Module], Any]] = {
    "method": lambda model: model.forward,
    "lambda": lambda model: lambda x: model(x),
    "generator": lambda model: (each for each in [model]),
    "slots": Slotted,
    "tuple": lambda model: ("name", model.forward, Slotted(model)),
}


def in_autocast(operator: Any, x: Tensor, argument: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return operator(x, argument)


CALLS: dict[str, Callable[[Any, Tensor, Any], Any]] = {
    "eager": lambda operator, x, argument: operator(x, argument),
    "backward": lambda operator, x, argument: operator(x.requires_grad_(), argument).sum().backward(),
    "autocast": in_autocast,
    "vmap": lambda operator, x, argument: torch.vmap(lambda x: operator(x, argument))(x),
    "grad": lambda operator, x, argument: torch.func.grad(lambda x: operator(x, argument).sum())(x),
    "checkpoint": lambda operator, x, argument: (
        checkpoint(operator, x.requires_grad_(), argument, use_reentrant=False).sum().backward()
    ),
}


@pytest.mark.every(8)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("argument", OBJECTS)
def test_a_class_keeps_no_object_that_it_was_called_with(argument: str, call: str) -> None:
    operator = adopted(Applying)
    living: list[weakref.ref[nn.Module]] = []
    for _ in range(3):
        model = nn.Linear(3, 3)
        living.append(weakref.ref(model))
        CALLS[call](operator, torch.ones(3), OBJECTS[argument](model))
        del model
    gc.collect()
    assert [each() for each in living] == [None] * 3


class Raising(Function):
    """Its backward raises once, where it is differentiated again."""

    failures: list[Exception] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        if Raising.failures and torch.is_grad_enabled():
            raise Raising.failures.pop()
        return 3 * grad * x**2


@pytest.mark.parametrize(
    "failure", [ValueError("once"), torch.OutOfMemoryError("once"), RuntimeError("once")]
)
def test_a_backward_that_raises_once_is_differentiated_again_later(failure: Exception) -> None:
    operator = adopted(Raising)
    x, _ = values()
    Raising.failures[:] = [failure]
    expected = errors.TransformError if type(failure) is RuntimeError else type(failure)
    with pytest.raises(expected, match="once"):
        differentiated_twice(operator, x)
    assert not Raising.failures
    for _ in range(3):
        assert_close(differentiated_twice(operator, x), [3 * x.detach() ** 2, 6 * x.detach()])
