"""The `repr` of every public object is at most 500 characters; `print` shows all of it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from short_benchmarks import shorten_benchmarks
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.checking.diagnosis import Diagnosis, Observation, Observer
from opsmith.display import LONGEST, short_repr, shortened, titled_repr
from opsmith.drawing import Options, figure
from opsmith.surveying import survey

WORDS = "a long sentence, with a line break\nand 'quotes' in it; " * 200


def public_classes() -> set[type]:
    """The classes of `__all__` of opsmith and of each of its packages, but the template of a new one."""
    found: set[type] = set()
    for info in pkgutil.iter_modules(opsmith.__path__, "opsmith."):
        module = importlib.import_module(info.name) if info.name != "opsmith.__main__" else opsmith
        names = [getattr(module, name) for name in getattr(module, "__all__", ())]
        found.update(each for each in names if isinstance(each, type))
    return found | {Observation, Observer, Diagnosis}


@opsmith.operator("short_reprs::wide")
def wide(
    first_of_many_arguments: Tensor,
    second_of_many_arguments: Tensor,
    third_of_many_arguments: Tensor,
    number_that_multiplies_the_first_of_them: float = 1.0,
    number_that_multiplies_the_second_of_them: float = 1.0,
    number_that_multiplies_the_third_of_them: float = 1.0,
    whether_the_sum_is_taken_over_the_last_dimension: bool = False,
    whether_the_sum_is_taken_over_the_first_dimension: bool = False,
    whether_the_sum_is_divided_by_the_number_of_elements: bool = False,
    a_number_that_is_added_to_all_of_the_elements_at_the_end: float = 0.0,
) -> Tensor:
    return first_of_many_arguments * second_of_many_arguments * third_of_many_arguments


wide.samples(lambda make: [(make(2), make(2), make(2))])


@opsmith.operator("short_reprs::wrong")
def wrong(x: Tensor) -> Tensor:
    return x * x


wrong.gradients(x=lambda grad, x: -2 * grad * x)
wrong.samples(lambda make: [(make(2),)])

CLASS = """
import torch

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad
"""


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 3 * grads[0]


def made(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What the public functions return, and values that are made by hand."""
    shorten_benchmarks(patch)
    call = [torch.ones(2, requires_grad=True) for _ in range(3)]
    yield wide
    yield wide.explain(*call)
    report = opsmith.check(wide, effort="quick", only=["forward"])
    yield report
    yield opsmith.check(wrong, effort="quick", only=["forward", "gradient"])
    measured = opsmith.benchmark(
        wide, samples=[call], effort="quick", compiled=False, directions=["forward"], report=report
    )
    yield measured
    yield measured.against(measured)
    graph = opsmith.draw(wide, folder / "wide.json")
    yield graph
    yield figure(graph)
    yield Options(inputs=call, title=WORDS)
    yield from (opsmith.ops.Linear(3, 4), opsmith.ops.RMSNorm(3), opsmith.ops.Involution2d(16, 3))
    yield opsmith.Launch(f"kernel({WORDS})", grid=1, constants={"long": WORDS})
    yield opsmith.Launch("kernel()", grid=1, constants={"large": 10**5000, "negative": -(10**5000)})
    yield opsmith.Make()
    yield opsmith.declared_operators("opsmith.ops")
    yield opsmith.init.constant(1.0)
    yield opsmith.not_implemented("why")
    yield from (opsmith.zero, opsmith.non_differentiable)
    yield survey(Doubled)


def reached(value: Any, done: set[int]) -> Iterator[Any]:
    """A value, and the parts of it that a reader reaches by names without an underscore."""
    if id(value) in done:
        return
    done.add(id(value))
    if isinstance(value, Mapping):
        for each in value.values():
            yield from reached(each, done)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from reached(each, done)
    elif is_dataclass(value) and not isinstance(value, type) and type(value).__module__.startswith("opsmith"):
        yield value
        for field in fields(value):
            yield from reached(getattr(value, field.name), done)
    elif type(value).__module__.startswith("opsmith"):
        yield value


def filled(kind: Any) -> Any:
    """A dataclass of which every field is a long text."""
    value = object.__new__(kind)
    for field in fields(kind):
        object.__setattr__(value, field.name, WORDS)
    return value


def test_every_public_object_has_a_short_repr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}  # by the name of the class, since every operator has a class of its own
    done: set[int] = set()
    kept = list(made(tmp_path, monkeypatch))  # an id is one object's while that is alive
    for value in kept:
        for each in reached(value, done):
            name = type(each).__name__
            seen[name] = max(repr(each), seen.get(name, ""), key=len)
    assert {name: len(text) for name, text in seen.items() if len(text) > LONGEST} == {}
    assert seen["Report"].startswith("<Report: short_reprs::wide: ")
    assert seen["Operator"].endswith("...>")
    names = "Report Outcome Failure Explanation Benchmark BenchmarkCase Verdict Graph Node Figure Options"
    assert {*names.split(), "Launch", "Make", "Finding", "Linear"} <= set(seen)


@pytest.mark.parametrize(
    "kind",
    sorted((each for each in public_classes() if is_dataclass(each)), key=lambda each: each.__qualname__),
)
def test_a_dataclass_with_long_fields_has_a_short_repr(kind: type) -> None:
    shared = kind.__repr__ is short_repr
    titled = kind.__repr__.__qualname__.startswith(titled_repr.__name__)
    own = kind.__module__ in ("opsmith.init", "opsmith.core.formula")
    assert shared or titled or own, "write `__repr__ = short_repr` into the class"
    if shared:
        text = repr(filled(kind))
        assert len(text) <= LONGEST
        assert text.startswith(f"{kind.__name__}({fields(kind)[0].name}=")


@pytest.mark.parametrize("kind", [getattr(errors, name) for name in errors.__all__])
def test_an_error_has_a_short_repr(kind: Any) -> None:
    error = kind(WORDS, operator="short_reprs::wide", got=WORDS, hint="shorten it")
    assert len(repr(error)) <= LONGEST
    assert repr(error).startswith(f'{kind.__name__}("short_reprs::wide: a long sentence')
    assert WORDS.strip() in str(error)
    assert repr(kind("no samples", hint="give some")) == f"{kind.__name__}('no samples hint: give some')"


@pytest.mark.slow  # imports torch's exporter
def test_an_export_and_its_module_have_a_short_repr(tmp_path: Path) -> None:
    made = opsmith.export_onnx(opsmith.ops.exp, torch.ones(2), tmp_path / "exp.onnx")
    for each in (made, *made.comparisons, opsmith.onnx.load(made.path)):
        assert 0 < len(repr(each)) <= LONGEST


def test_a_text_is_cut_where_it_is_too_long() -> None:
    assert shortened("short") == "short"
    assert shortened("x" * LONGEST) == "x" * LONGEST
    assert shortened("x" * (LONGEST + 1)) == "x" * (LONGEST - 3) + "..."
