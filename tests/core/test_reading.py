"""Uses of arguments in code, read from its source."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch.autograd import Function

from opsmith.checking.samples.argument_values import others
from opsmith.core.reading import Reading

ORDERS = {"one": 1, "two": 2}
ARRAY = np.zeros(2)


def reading(function: Callable[..., Any], *arguments: str) -> Reading:
    found = Reading()
    found.read(function, {name: name for name in arguments})
    return found


def values(function: Callable[..., Any]) -> list[Any]:
    return [value for each in reading(function, "k").compared["k"] for value in each.values]


def wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


@wrapped
def helper(given: Any, factor: Any = 1) -> Any:
    return given.lower() == "square"


def by_keyword(k: Any) -> Any:
    return helper(3, factor=k) or helper(given=k)


def by_names(k: Any) -> Any:
    first, (second, _) = k, (k, 3)
    return (third := second) == "named" and third == first


EQUALITIES: dict[str, tuple[Any, list[Any]]] = {
    "a literal": (lambda k: k == -1, [-1]),
    "on either side": (lambda k: k != 2, [2]),
    "a key of a global table": (lambda k: ORDERS.get(k, 0) + ORDERS[k], ["one", "two", "one", "two"]),
    "a table in place": (lambda k: {"left": 0, "right": 1}[k], ["left", "right"]),
    "a member of a module": (lambda k: k is math.pi, [math.pi]),
    "infinity": (lambda k: k == float("inf"), [math.inf]),
    "an array, which is no value": (lambda k: k is ARRAY, []),
    "a function under a decorator, by keyword": (by_keyword, ["square"]),
    "other names": (by_names, ["named"]),
    "a membership of unknown values": (lambda k: k in (3, len("four")), []),
}


@pytest.mark.parametrize("name", EQUALITIES)
def test_values_that_an_argument_is_equal_to(name: str) -> None:
    function, expected = EQUALITIES[name]
    assert values(function) == expected


CONDITIONS: dict[str, tuple[Any, Any, Any]] = {
    "an order": (lambda k: k > 3, 2, 4),
    "an order, from the other side": (lambda k: k <= 3, 5, 3),
    "a chain": (lambda k: 0 < k < 8, 4, 8),
    "a remainder": (lambda k: k % 4 < 1, 6, 4),
    "a divisor": (lambda k: 12 % k == 0, 5, 6),
    "a quotient": (lambda k: k // 2 == 2, 3, 4),
    "a product": (lambda k: 2 * k >= 7, 3, 4),
    "truth": (lambda k: "yes" if k else "", 3, 0),
    "the truth of a remainder": (lambda k: not k % 8, 8, 9),
    "a float": (lambda k: k < 0.5, 0.25, 0.5),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_number_on_the_other_side_of_a_condition(name: str) -> None:
    function, value, expected = CONDITIONS[name]
    found = reading(function, "k").compared["k"]
    assert expected in [other for each in found for other in others(each, value)]
    assert bool(function(value)) != bool(function(expected))


def test_a_condition_on_two_arguments_or_on_a_local_number_is_none() -> None:
    def two(k: Any, n: Any) -> Any:
        limit = len("four")
        return k > n or k > limit or k % limit == 1

    assert reading(two, "k", "n").compared == {}


class InContext(Function):
    """Its context carries a function, and its `setup_context` has other names."""

    @staticmethod
    def forward(x: Any, function: Any, mode: Any) -> Any:
        return function(x).real

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        given, ctx.function, _ = inputs
        ctx.mode, ctx.kept = inputs[2], given.shape

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return ctx.function(grad) if ctx.mode == "plain" else None


def test_arguments_are_followed_through_the_context_of_a_class() -> None:
    found = Reading()
    found.read_class(InContext, ["x", "function", "mode"])
    assert found.called == {"function"}
    assert {**found.asked} == {"shape": {"x"}}
    assert [each.values for each in found.compared["mode"]] == [("plain",)]
    assert found.kept == {"function": "function", "mode": "mode"}
    assert [*found.methods] == ["forward", "setup_context", "backward"]
