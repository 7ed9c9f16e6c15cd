"""Operators of torch.library that write in place, without a reference: each is held to its own eager run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith.core.call_arguments import CallArguments

Samples = list[Any]
TWO: Samples = [(torch.linspace(-1, 1, 12).view(3, 4), torch.linspace(0, 2, 12).view(3, 4))]
ONE: Samples = [(torch.linspace(-1, 1, 12).view(3, 4),)]

calls = [0]
numbers = itertools.count()


def adds(x: Tensor, y: Tensor) -> None:
    x.add_(y)


def adds_and_sums(x: Tensor, y: Tensor) -> Tensor:
    x.add_(y)
    return x.sum(1)


def clamps(x: Tensor) -> None:
    x.clamp_(max=5)  # changes nothing here, and lets a nan be


def fills(x: Tensor, out: Tensor | None) -> Tensor:
    if out is not None:
        out.copy_(x * 2)
    return x.sum(0)


def scales(xs: list[Tensor], by: float) -> None:
    for x in xs:
        x.mul_(by)


def puts(x: Tensor, y: Tensor, *, out: Tensor) -> None:
    out.copy_(x * y)


def writes_into_both(x: Tensor, y: Tensor) -> None:
    x.add_(y)
    y.mul_(0.5)


def ignores_strides(x: Tensor, y: Tensor) -> None:
    torch.as_strided(x, (x.numel(),), (1,)).add_(y.reshape(-1))


def ignores_strides_of_what_it_reads(x: Tensor, y: Tensor) -> None:
    x.add_(torch.as_strided(y, y.shape, (y.shape[1], 1)))


def counts(x: Tensor, y: Tensor) -> None:
    calls[0] += 1
    x.add_(y * calls[0])


def by_numpy(x: Tensor, y: Tensor) -> None:
    x.detach().numpy()[...] += y.numpy()


def rows(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty(x.shape[0])


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    library = torch.library.Library("in_place_of_torch", "FRAGMENT")
    yield library
    library._destroy()


def checked(operator: Any, samples: Samples, effort: str = "quick") -> list[tuple[str, str | None, str, str]]:
    """Property, input, cause and severity of each failure."""
    report = opsmith.check(operator, samples=samples, effort=effort, isolate=False)
    ran = {each.property: each.status for each in report.outcomes}
    assert ran["forward"] != "skipped"
    assert ran["mutation"] != "skipped"
    assert {ran["vmap"], ran["gradient"]} == {"skipped"}, "torch has no rule for it"
    return [(each.property, each.input, each.cause, each.severity) for each in report.failures]


def registered(
    function: Callable[..., Any], schema: str | tuple[str, ...], library: torch.library.Library, fake: Any
) -> Any:
    """The operator by `custom_op`, of the names that are written, or by `Library.define`, of a schema."""
    name = f"{function.__name__}_{next(numbers)}"
    if isinstance(schema, tuple):
        operator = torch.library.custom_op(f"in_place_of_torch::{name}", function, mutates_args=schema)
        if fake is not None:
            operator.register_fake(fake)
        return operator
    library.define(name + schema)
    library.impl(name, function, "CPU")
    torch.library.register_fake(f"in_place_of_torch::{name}", fake or (lambda *args, **kwargs: None))
    return getattr(torch.ops.in_place_of_torch, name)


PAIR = "(Tensor(a!) x, Tensor y)"
RIGHT: dict[str, tuple[Callable[..., Any], Any, Samples, Any]] = {
    "custom_op": (adds, ("x",), TWO, None),
    "defined": (adds, f"{PAIR} -> ()", TWO, None),
    "custom_op, with a result": (adds_and_sums, ("x",), TWO, rows),
    "defined, with a result": (adds_and_sums, f"{PAIR} -> Tensor", TWO, rows),
    "custom_op, a list": (scales, ("xs",), [([torch.ones(3), torch.ones(2, 2)], 2.0)], None),
    "defined, by keyword": (
        puts,
        "(Tensor x, Tensor y, *, Tensor(a!) out) -> ()",
        [CallArguments(TWO[0], {"out": torch.zeros(3, 4)})],
        None,
    ),
    "custom_op, optional": (
        fills,
        ("out",),
        [(torch.ones(3), torch.zeros(3)), (torch.ones(3), None)],
        lambda x, out: x.new_empty(()),
    ),
}


@pytest.mark.every(8)
@pytest.mark.parametrize("name", RIGHT)
def test_one_that_is_right(name: str, library: torch.library.Library) -> None:
    function, schema, samples, fake = RIGHT[name]
    assert checked(registered(function, schema, library, fake), samples) == []


@pytest.mark.xdist_group("compiled in place of torch")
def test_compiled_code_of_one_that_is_right(library: torch.library.Library) -> None:
    operator = registered(adds_and_sums, ("x",), library, rows)
    report = opsmith.check(operator, samples=TWO, only=["compile", "export", "opcheck"], isolate=False)
    ran = {each.property: each.status for each in report.outcomes if each.status != "skipped"}
    assert ran == {"compile": "passed", "export": "passed", "opcheck": "passed"}


def test_one_that_leaves_all_elements_as_they_are_lacks_a_sample(library: torch.library.Library) -> None:
    operator = registered(clamps, ("x",), library, None)
    assert checked(operator, ONE) == [("mutation", "x", "not-exercised", "limit")]


BOTH = "(Tensor(a!) x, Tensor(b!) y) -> ()"
FAULTS: dict[str, tuple[Callable[..., Any], Any, Any, set[tuple[str, str | None, str]]]] = {
    "fake dtype, custom_op": (
        adds_and_sums,
        ("x",),
        lambda x, y: x.new_empty(x.shape[0], dtype=torch.float64),
        {("fake", "result", "fake-mismatch"), ("opcheck", None, "fake-mismatch")},
    ),
    "fake shape, defined": (
        adds_and_sums,
        f"{PAIR} -> Tensor",
        lambda x, y: x.new_empty(x.shape[1]),
        {("fake", "result", "fake-mismatch"), ("opcheck", None, "fake-mismatch")},
    ),
    "undeclared write, custom_op": (writes_into_both, ("x",), None, {("effects", "y", "mutates-input")}),
    "undeclared write, defined": (
        writes_into_both,
        f"{PAIR} -> ()",
        None,
        {("effects", "y", "mutates-input")},
    ),
    "strides of what it writes, custom_op": (
        ignores_strides,
        ("x",),
        None,
        {("mutation", "x", "layout"), ("layouts", "x", "layout")},
    ),
    "strides of what it reads, defined": (
        ignores_strides_of_what_it_reads,
        f"{PAIR} -> ()",
        None,
        {("mutation", "x", "layout"), ("layouts", "y", "layout")},
    ),
    "never written, custom_op": (adds, ("x", "y"), None, {("mutation", "y", "not-written")}),
    "never written, defined": (adds, BOTH, None, {("mutation", "y", "not-written")}),
    "state": (counts, ("x",), None, {("effects", None, "side-effect"), ("state", None, "stale-state")}),
    "unseen write, defined": (by_numpy, f"{PAIR} -> ()", None, {("mutation", "x", "version")}),
}


@pytest.mark.every(8)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, library: torch.library.Library) -> None:
    function, schema, fake, expected = FAULTS[name]
    found = checked(registered(function, schema, library, fake), TWO)
    assert {each[:3] for each in found if each[3] == "error"} == expected


def test_the_message_and_its_hint(library: torch.library.Library) -> None:
    operator = registered(adds, ("x", "y"), library, None)
    report = opsmith.check(operator, samples=TWO, only=["mutation"], isolate=False)
    (failure,) = report.failures
    assert failure.message == (
        "`y` is declared in `mutates_args=` or its schema, but the operator does not write into it "
        "on any sample: remove it from `mutates_args=` or its schema, or write into it, for example "
        "by `.copy_(...)`"
    )
    right = registered(adds, ("x",), library, None)
    assert opsmith.check(right, samples=TWO, only=["mutation"], isolate=False).failures == ()
