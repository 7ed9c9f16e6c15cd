"""A reference that makes a number of a symbolic size is told of the line, and of what keeps the symbol."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith.checking import Failure
from opsmith.checking.properties.torch.fake import INSTEAD, frozen
from opsmith.torch_library import capabilities

X = torch.rand(4, 6) + 0.5


class Scale:
    def of(self, x: Tensor) -> float:
        return 1 / math.sqrt(x.shape[-1])


def scale_of(x: Tensor) -> float:
    return 1 / math.sqrt(x.shape[-1])


def logarithm(x: Tensor) -> Tensor:
    return x * math.log(x.shape[0])


def exponential(x: Tensor) -> Tensor:
    return x * math.exp(
        -len(x),
    )


def by_method(x: Tensor) -> Tensor:
    return x * Scale().of(x)


def by_function(x: Tensor) -> Tensor:
    return x * scale_of(x)


def loop(x: Tensor) -> Tensor:
    total = torch.zeros((), dtype=x.dtype)
    for row in range(x.shape[0]):
        total = total + x[row].sum() * row
    return total


def asserts(x: Tensor) -> Tensor:
    assert x.shape[1] == 6
    return x * math.log(2)


def halves(x: Tensor) -> Tensor:
    return x[: x.shape[0] // 2] / math.sqrt(x.shape[0]) + float(len(x))


def product(x: Tensor) -> Tensor:
    return x @ x.new_ones(6, 2)


def found(function: Callable[..., Tensor]) -> list[Failure]:
    operator = opsmith.operator(f"frozen_sizes::{function.__name__}")(function)
    report = opsmith.check(operator, samples=[(X,)], only=["fake"])
    return list(report.failures)


def line_of(function: Callable[..., Any], offset: int = 1) -> str:
    return f"{Path(__file__).name}:{function.__code__.co_firstlineno + offset}"


@pytest.mark.parametrize(
    ("function", "where", "message"),
    [
        (
            logarithm,
            line_of(logarithm),
            "`math.log(x.shape[0])` turns the size of `x` in dimension 0 into a number, so code is "
            "compiled again for each other size: write `math.log2(n) * math.log(2)`",
        ),
        (
            exponential,
            line_of(exponential),
            "`math.exp(-len(x))` turns the size of `x` in dimension 0 into a number, so code is "
            "compiled again for each other size: write `math.e ** n`",
        ),
        (
            by_method,
            line_of(Scale.of),
            "`math.sqrt(x.shape[-1])` turns the size of `x` in dimension 1 into a number, so code "
            "is compiled again for each other size: move it to a function outside of the class: in "
            "a method, a size becomes a number",
        ),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_line_that_freezes_a_size_is_a_warning(
    function: Callable[..., Tensor], where: str, message: str
) -> None:
    failures = found(function)
    assert len(failures) == 1
    (failure,) = failures
    assert (failure.cause, failure.severity, failure.input) == ("frozen-size", "warning", "x")
    assert (failure.message, Path(failure.where).name) == (message, where)


@pytest.mark.parametrize("function", [loop, asserts, product], ids=lambda each: each.__name__)
def test_where_nothing_else_keeps_the_symbol_it_is_a_limit(function: Callable[..., Tensor]) -> None:
    assert {(each.cause, each.severity) for each in found(function)} == {("recompiles", "limit")}


@pytest.mark.parametrize("function", [by_function, halves], ids=lambda each: each.__name__)
def test_what_keeps_the_symbol_is_right(function: Callable[..., Tensor]) -> None:
    assert found(function) == []


@pytest.mark.every(4)
@pytest.mark.parametrize("name", INSTEAD)
def test_each_advice_keeps_the_symbol_and_the_value(name: str) -> None:
    given = "a, b" if name == "hypot" else "n"
    original, written = f"math.{name}({given})", INSTEAD[name]
    values = []
    for source in (original, written):
        scope: dict[str, Any] = {"math": math}
        exec(f"def reference(x):\n    n, a, b = x.shape[0], *x.shape\n    return x * {source}", scope)
        reference: Any = scope["reference"]
        assert isinstance(reference, types.FunctionType)
        reference.__annotations__ = {"x": Tensor, "return": Tensor}
        operator = opsmith.operator(f"frozen_sizes::{name}_{len(values)}")(reference)
        mode = capabilities.symbolic_mode()
        assert mode is not None
        fake = mode.from_tensor(X)
        with mode:
            operator(fake)
        values.append((operator(X), mode.fixed(fake.shape[0])))
    (value, was_fixed), (instead, is_fixed) = values
    torch.testing.assert_close(instead, value)
    assert (was_fixed, is_fixed) == (True, False)


def test_text_that_is_no_python_has_no_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n    math.log(n)\n")
    assert frozen(str(tmp_path / "broken.py"), 2, "f") is None
    assert frozen(str(tmp_path / "missing.py"), 2, "f") is None
