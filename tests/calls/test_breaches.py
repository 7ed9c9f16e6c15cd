"""The contract: each breach of it is refused by each executor, with one class of error."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from call_breaches import BREACHES, CARRIERS
from call_cells import CALLS, MODES, RIGHT, Saving, in_modes, modes_of, of_a_breach, outcome, said
from call_executors import EXECUTORS, Executor
from call_subjects import declared, list_with_formulas
from calls_today import BREACHES as TODAY
from torch import Tensor

import opsmith
from opsmith import errors

pytestmark = [
    # torch says so of the breach itself.
    pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning"),
    # torch reads `.grad` of what it compiles.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*gathers its DTensors:UserWarning"),
]

DIRECT = [each for each in EXECUTORS.values() if each.way]
"""Executors of a plain call, which say the same to the letter."""


def cells() -> Iterator[Any]:
    """All breaches in all executors.

    Of each kind one is fast in direct executors; half of the kinds are in each other one, a quarter compiled.
    """
    kinds: dict[str, list[str]] = {}
    for name in BREACHES:
        carrier, _, kind = name.partition("-")
        kinds.setdefault(kind if carrier in CARRIERS else name, []).append(name)
    executors = [each for each in EXECUTORS.values() if each.name != "DTensor rows"]
    for at, names in enumerate(kinds.values()):
        for row, executor in enumerate(executors):
            for position, name in enumerate(names):
                if executor.chosen is not None and name not in executor.chosen:
                    continue
                spread = bool(executor.way) or (at // 4 + row) % (4 if executor.compiles else 2) == 0
                first = spread and position == (at + row) % len(names)
                slow = executor.chosen is not None or not first
                marks = [pytest.mark.slow] * slow + [pytest.mark.compile] * executor.compiles
                yield pytest.param(name, executor.name, id=f"{name}-{executor.name}", marks=marks)


@pytest.mark.parametrize(("breach", "executor"), [*cells()], indirect=["executor"])
def test_cell(breach: str, executor: Executor) -> None:
    found = said(BREACHES[breach], executor)
    today = in_modes(TODAY.get(breach, {}).get(executor.name, RIGHT), modes_of(BREACHES[breach], executor))
    if today != RIGHT:
        assert found == today, "if it is refused now, delete the row of `calls_today`"
        pytest.xfail(today)
    assert found == RIGHT


def in_each(call: Callable[[Executor], Any]) -> list[Any]:
    """The answers of a call in all direct executors that there are here."""
    found = []
    for each in DIRECT:
        if not each.missing:
            with each.in_force():
                found.append(call(each))
    return found


REFUSED = [name for name, row in BREACHES.items() if row.error and "dispatcher" not in TODAY.get(name, {})]


@pytest.mark.every(8)
@pytest.mark.parametrize("breach", REFUSED)
def test_direct_executors_say_the_same(breach: str) -> None:
    row = BREACHES[breach]
    raised = in_each(lambda each: of_a_breach(row, each, MODES[row.modes[0]]))
    assert len({str(error) for error in raised}) == 1
    if isinstance(raised[0], errors.OpsmithError):
        assert row.declared.operator.name in str(raised[0])
        assert raised[0].hint
        assert row.argument in ("", raised[0].argument)


WRONG_CALLS: dict[str, Callable[[Tensor], Any]] = {
    "nothing": lambda x: declared(),
    "too few": lambda x: declared(x),
    "a number for a tensor": lambda x: declared(x, 3.0),
    "None for a tensor": lambda x: declared(None, x),
    "too many": lambda x: declared(x, x, 1.0, 2),
    "an unknown name": lambda x: declared(x, x, bye=2),
    "a text for a number": lambda x: declared(x, x, "2"),
    "a tensor for a number": lambda x: declared(x, x, torch.ones(())),
    "a number in a list": lambda x: list_with_formulas([x, 2.0], x),
    "None in a list": lambda x: list_with_formulas([x, None], x),
    "a number for a list": lambda x: list_with_formulas(2.0, x),
    "a tensor for a list": lambda x: list_with_formulas(x, x),
    "a sparse tensor": lambda x: declared(x.to_sparse(), x),
    "a sparse tensor after a plain one": lambda x: declared(x, x.to_sparse()),
    "a sparse tensor in a list": lambda x: list_with_formulas([x, x.to_sparse()], x),
}


@pytest.mark.parametrize("wrong", WRONG_CALLS)
def test_direct_executors_refuse_wrong_calls_alike(wrong: str) -> None:
    x = torch.ones(2)

    def call(_executor: Executor) -> str:
        for operator in (declared, list_with_formulas):
            operator.forget_calls()
        for _ in range(CALLS):
            declared(x, x + 1)
            list_with_formulas([x, x + 1], x)
        with pytest.raises((errors.ArgumentError, errors.LayoutError)) as refused:
            WRONG_CALLS[wrong](x)
        return str(refused.value)

    assert len(set(in_each(call))) == 1


@pytest.mark.parametrize("executor", [each.name for each in DIRECT], indirect=True)
def test_where_algorithms_must_be_deterministic(executor: Executor) -> None:
    operator = opsmith.operator("breaches::scattered", deterministic=False)(_tripled)
    for _ in range(CALLS):
        operator(torch.ones(2))
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(errors.NondeterministicError):
            operator(torch.ones(2))
    finally:
        torch.use_deterministic_algorithms(False)


def _tripled(x: Tensor) -> Tensor:
    return x * 3


def _minus(x: Tensor, y: Tensor) -> Tensor:
    return x - y


def _opaque_minus(x: Tensor, y: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() - y.numpy())


def _with_count(x: Tensor, y: Tensor, times: int = 1) -> Tensor:
    return (x - y) * times


BY_POSITION: dict[str, tuple[Callable[..., Any], bool, Callable[[Any], Any]]] = {
    "a kernel": (_minus, False, lambda made: made.kernel("cpu", lambda y, x: x - y)),
    "a kernel with a number": (
        _with_count,
        False,
        lambda made: made.kernel("cpu", lambda x, times, y: (x - y) * times),
    ),
    "a fake kernel": (_opaque_minus, True, lambda made: made.fake(lambda y, x: torch.empty_like(x))),
    "a count of operations": (_minus, False, lambda made: made.flops(lambda y, x: x.numel())),
    "a stand-in": (_minus, False, lambda made: made.surrogate_gradients(lambda y, x: x - y)),
}
"""Functions that are called by position, and have the operator's own names in another order."""


@pytest.mark.parametrize("kind", BY_POSITION)
def test_own_names_in_another_order_are_refused(kind: str) -> None:
    reference, opaque, attach = BY_POSITION[kind]
    made = opsmith.operator(f"breaches::{re.sub('[^a-z]', '_', kind)}", opaque=opaque)(reference)
    with pytest.raises(errors.OpsmithError, match=r"x.*y"):
        attach(made)


def test_other_names_are_no_order() -> None:
    made = opsmith.operator("breaches::other_names")(_minus)
    made.kernel("cpu", lambda a, b: a - b)
    assert made(torch.tensor(3.0), torch.tensor(1.0)).item() == 2


def _product(x: Tensor, w: Tensor) -> Tensor:
    return x * w


def test_gradients_in_inference_mode_are_those_of_a_class() -> None:
    # Operations of torch 2.11 give zeros there, and its classes are refused.
    def gradient(function: Callable[..., Tensor]) -> Any:
        with torch.inference_mode():
            return outcome(lambda: torch.func.grad(lambda x: function(x, x).sum())(torch.full((2,), 3.0)))

    operator = opsmith.operator("breaches::saving")(_product)
    operator.gradients(x=lambda grad, w: grad * w, w=lambda grad, x: grad * x)
    assert str(gradient(operator)) == str(gradient(Saving.apply))
