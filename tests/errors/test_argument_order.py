"""Functions that get the operator's arguments by position have its names in its order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import opsmith
from opsmith import errors
from opsmith.core.location import where

Place = Callable[[Callable[..., Any]], str]
X, Y = torch.tensor([3.0, 5.0]), torch.tensor([1.0, 4.0])


def swapped(y: Tensor, x: Tensor) -> Tensor:
    return x - y


def in_order(x: Tensor, y: Tensor) -> Tensor:
    return x - y


def with_own_names(b: Tensor, a: Tensor) -> Tensor:
    return b - a


def with_any(*given: Tensor) -> Tensor:
    return given[0] - given[1]


RIGHT = [in_order, with_own_names, with_any]


def minus(x: Tensor, y: Tensor) -> Tensor:
    return x - y


def opaque_minus(x: Tensor, y: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy() - y.detach().numpy())


def value_of_kernel(name: str, function: Callable[..., Any]) -> Tensor:
    operator = opsmith.operator(name)(minus)
    operator.kernel("cpu", function)
    return operator(X, Y)


def value_of_stand_in(name: str, function: Callable[..., Any]) -> Tensor:
    operator = opsmith.operator(name)(minus).surrogate_gradients(function)
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    operator(x, y).sum().backward()
    torch.testing.assert_close(torch.stack([x.grad, y.grad]), torch.tensor([[1.0, 1.0], [-1.0, -1.0]]))
    return operator(X, Y)


def value_of_class_reference(name: str, function: Callable[..., Any]) -> Tensor:
    return opsmith.adopt(Minus, name, reference=function).reference(X, Y)


def value_of_nested_class_reference(name: str, function: Callable[..., Any]) -> Tensor:
    """A reference of a class whose arguments the operator carries in others."""
    signature = "(x: Tensor, y: float | Tensor) -> Tensor"
    return opsmith.adopt(Minus, name, reference=function, signature=signature).reference(X, Y, None)


class Minus(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x - y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad, -grad


ATTACHED = {
    "the kernel for cpu": value_of_kernel,
    "the stand-in": value_of_stand_in,
    "the reference": value_of_class_reference,
    "the reference of nested arguments": value_of_nested_class_reference,
}


@pytest.mark.parametrize("attached", ATTACHED)
def test_another_order_is_refused(attached: str, name: str, place: Place, says: Any) -> None:
    what = attached.partition(" of ")[0]
    with says(
        errors.NotAFunctionError,
        f"""
        {name}: {what} has the operator's argument names in another order, but gets the arguments by position
          expected: f(x, y)
          got: swapped(y: 'Tensor', x: 'Tensor') -> 'Tensor'
          where: {place(swapped)}
          hint: write `def f(x, y): ...`, in this order, or give its parameters different names
        """,
    ):
        ATTACHED[attached](name, swapped)


@pytest.mark.parametrize("right", RIGHT, ids=lambda each: each.__name__)
@pytest.mark.parametrize("attached", ATTACHED)
def test_the_hint_works(attached: str, right: Callable[..., Any], name: str) -> None:
    assert torch.equal(ATTACHED[attached](name, right), X - Y)


def test_a_fake_kernel_in_another_order(name: str) -> None:
    operator = opsmith.operator(name, opaque=True)(opaque_minus)
    with pytest.raises(
        errors.NotAFunctionError, match="the fake kernel has the operator's argument names in"
    ):
        operator.fake(lambda y, x: torch.empty_like(x))
    operator.fake(lambda x, y: torch.empty_like(x))
    given = torch.ones(3, device="meta"), torch.ones(1, device="meta")
    assert operator(*given).shape == (3,)


def test_a_count_of_operations_in_another_order(name: str) -> None:
    operator = opsmith.operator(name, opaque=True)(opaque_minus)
    with pytest.raises(
        errors.NotAFunctionError, match="floating-point operations has the operator's argument"
    ):
        operator.flops(lambda y, x: x.numel())
    operator.flops(lambda x, y: x.numel())
    with FlopCounterMode(display=False) as counter:
        operator(torch.ones(3), torch.ones(1))
    assert counter.get_total_flops() == 3


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        ("x, y, by", False),
        ("x, *rest", False),
        ("a, b, c", False),
        ("a, x, y", False),  # names of its own, which happen to be those of others
        ("y, b, c", False),
        ("y, x, by", True),
        ("y, x, c", True),
        ("a, by, y", True),
        ("y, by, x", True),
        ("y, x, *rest", True),
        ("y, x, /, by", True),
    ],
)
def test_orders_of_three(names: str, refused: bool, name: str) -> None:
    def scaled(x: Tensor, y: Tensor, by: float) -> Tensor:
        return x * y * by

    operator = opsmith.operator(name)(scaled)
    kernel = eval(f"lambda {names}: None")
    if refused:
        with pytest.raises(errors.NotAFunctionError, match="in another order"):
            operator.kernel("cpu", kernel)
    else:
        operator.kernel("cpu", kernel)


def test_what_is_given_by_name_may_stand_anywhere(name: str) -> None:
    def scaled(x: Tensor, *, by: float, plus: float) -> Tensor:
        return x * by + plus

    operator = opsmith.operator(name)(scaled)
    operator.kernel("cpu", lambda x, *, plus, by: x * by + plus)
    assert operator(torch.ones(1), by=2.0, plus=3.0).item() == 5.0


def test_a_signature_in_another_order(name: str, says: Any) -> None:
    with says(
        errors.UsageError,
        f"""
        {name}: `signature` does not fit `Minus.forward`
          argument: signature
          expected: 2 arguments: x, y
          got: 2: y, x
          where: {where(Minus.forward)}
          hint: name the arguments of forward, without `ctx`, in its order
        """,
    ):
        opsmith.adopt(Minus, name, signature="(y: Tensor, x: Tensor) -> Tensor")
    operator = opsmith.adopt(Minus, name, signature="(x: Tensor, y: Tensor) -> Tensor")
    assert torch.equal(operator(y=Y, x=X), X - Y)


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    library: Any = torch.library.Library("other_order", "FRAGMENT")
    yield library
    library._destroy()


def test_the_reference_of_an_operator_of_a_library(
    library: torch.library.Library, says: Any, place: Place
) -> None:
    library.define("minus(Tensor x, Tensor y) -> Tensor")
    library.impl("minus", lambda x, y: x - y, "CPU")
    problem = "has the operator's argument names in another order, but gets the arguments by position"
    with says(
        errors.SignatureMismatchError,
        f"""
        other_order::minus: the reference {problem}
          expected: other_order::minus(Tensor x, Tensor y) -> Tensor
          got: swapped(y: Tensor, x: Tensor) -> Tensor
          where: {place(swapped)}
          hint: take the arguments in the operator's order, or give the parameters different names
        """,
    ):
        opsmith.adopt(torch.ops.other_order.minus, reference=swapped)
    for right in (in_order, with_own_names):
        operator = opsmith.adopt(torch.ops.other_order.minus, reference=right)
        assert torch.equal(operator.reference(X, Y), X - Y)
