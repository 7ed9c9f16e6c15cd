"""The hash of sources: it follows what a function reaches, and agrees between processes."""

from __future__ import annotations

import functools
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import opsmith
from opsmith.core.source_hash import operator_hash, source_hash


def written(source: str, **names: Any) -> Callable[..., Any]:
    """The function `f` of a source text, in a module of its own."""
    module = types.ModuleType("user_module")
    module.__file__ = "user_module.py"
    vars(module).update(names)
    exec(source, vars(module))
    return vars(module)["f"]


def member_of(value: float) -> types.ModuleType:
    module = types.ModuleType("helpers_of_user")
    module.__file__ = "helpers_of_user.py"
    sys.modules["helpers_of_user"] = module
    exec(f"def g(x): return x * {value}", vars(module))
    return module


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor


PLACES: dict[str, Callable[[float], Any]] = {
    "constant": lambda v: written(f"def f(x): return x * {v}"),
    "nested function": lambda v: written(f"def f(x):\n    def g(y): return y * {v}\n    return g(x)"),
    "global": lambda v: written("def f(x): return x * K", K=v),
    "global in nested function": lambda v: written("def f(x): return (lambda y: y * K)(x)", K=v),
    "helper": lambda v: written(f"def g(x): return x * {v}\ndef f(x): return g(x)"),
    "helper of helper": lambda v: written(
        f"def h(x): return x * {v}\ndef g(x): return h(x)\ndef f(x): return g(x)"
    ),
    "default": lambda v: written(f"def f(x, k={v}): return x * k"),
    "keyword default": lambda v: written(f"def f(x, *, k={v}): return x * k"),
    "closure": lambda v: written(f"def make(k):\n    def f(x): return x * k\n    return f\nf = make({v})"),
    "table": lambda v: written("def f(x): return x * K['a'][0]", K={"a": [v]}),
    "set": lambda v: written("def f(x): return x in K", K={v, 7}),
    "member of a module": lambda v: written("def f(x): return helpers.g(x)", helpers=member_of(v)),
    "partial": lambda v: functools.partial(written("def f(k, x): return x * k"), v),
    "method": lambda v: written(f"class A:\n    def g(self, x): return x * {v}\ndef f(x): return A().g(x)"),
    "tensor": lambda v: written("def f(x): return x * T", T=torch.full((3,), v)),
    "function of a library": lambda v: written(
        f"def f(x): return torch.{'sin' if v == 1 else 'cos'}(x)", torch=torch
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_change_is_seen(place: str) -> None:
    assert source_hash(PLACES[place](1.0)) == source_hash(PLACES[place](1.0))
    assert source_hash(PLACES[place](1.0)) != source_hash(PLACES[place](2.0))


def test_recursion_ends() -> None:
    assert source_hash(written("def f(x): return f(x - 1) if x else 0"))


def test_what_cannot_be_followed_counts_as_this_process() -> None:
    function = written("def f(x): return x * S.factor", S=Scale(1.0))
    assert source_hash(function) == source_hash(function)


def test_an_operator_counts_with_its_formulas() -> None:
    @opsmith.operator("source_hash::square")
    def square(x: torch.Tensor) -> torch.Tensor:
        return x * x

    before = operator_hash(square.specification)
    square.samples(lambda make: [make(2)])
    assert operator_hash(square.specification) == before
    square.gradients(x=lambda grad, x: 2 * grad * x)
    assert operator_hash(square.specification) != before


@pytest.mark.slow
def test_processes_agree_on_the_bundled_operators() -> None:
    program = (
        "import opsmith.ops\n"
        "from opsmith.core.source_hash import operator_hash\n"
        "for operator in opsmith.declared_operators(): print(operator_hash(operator.specification))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout for _ in "12"
    ]
    assert runs[0] == runs[1] != b""
