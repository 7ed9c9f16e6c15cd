"""The matrix of calls: in each executor and context an operator gives what plain torch gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from call_cells import CALLS, expected, happened
from call_contexts import CONTEXTS
from call_executors import EXECUTORS, Executor, way_taken
from call_subjects import SUBJECTS
from calls_today import CELLS
from context_cases import LetThrough, loss_of, values_and_gradients
from torch import Tensor
from torch.testing import assert_close

import opsmith

# Warnings of torch about its own ways, for plain functions, too.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning"),
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.trace` is deprecated"),
    pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantiz.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*gathers its DTensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]
FIRST = "requires-grad"


def cells() -> Iterator[Any]:
    """All cells.

    Fast are a diagonal, and the first context: of all subjects in direct executors, of half of them in each
    other one, of a quarter compiled.
    """
    for at, name in enumerate(SUBJECTS):
        for row, executor in enumerate(EXECUTORS.values()):
            if executor.chosen is not None and name not in executor.chosen:
                continue
            contexts = [each for each in CONTEXTS if executor.contexts is None or each in executor.contexts]
            for column, context in enumerate(contexts):
                chosen = not executor.compiles and (at + row + column) % len(SUBJECTS) == 0
                spread = bool(executor.way) or (at // 4 + row) % (4 if executor.compiles else 2) == 0
                first = context == FIRST and spread
                slow = executor.chosen is not None or not (first or chosen)
                marks = [pytest.mark.slow] * slow + [pytest.mark.compile] * executor.compiles
                yield pytest.param(
                    name, executor.name, context, id=f"{name}-{executor.name}-{context}", marks=marks
                )


@pytest.mark.parametrize(("subject", "executor", "context"), [*cells()], indirect=["executor"])
def test_cell(subject: str, executor: Executor, context: str) -> None:
    row = SUBJECTS[subject]
    today = CELLS.get((executor.name, context), {}).get(subject)
    found = happened(row, executor, context)
    if today is not None:
        assert found == today, "if this is right now, delete the row of `calls_today`"
        pytest.xfail(today)
    assert found == expected(row, executor, context)


@pytest.mark.parametrize("executor", [each.name for each in EXECUTORS.values() if each.way], indirect=True)
def test_the_executor_that_is_chosen_makes_the_calls(executor: Executor) -> None:
    # A handle that a compiled graph of another test holds keeps its `__call__`.
    operator = opsmith.operator("calls::never_compiled")(product)
    for _ in range(CALLS):
        operator(torch.ones(2), torch.ones(2))
    assert way_taken(operator) == executor.way


def product(x: Tensor, w: Tensor) -> Tensor:
    return x * w


AROUND_BACKWARDS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "dispatch mode": LetThrough,
    "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda each: each.clone(), lambda each: each),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("executor", [each.name for each in EXECUTORS.values() if each.way], indirect=True)
@pytest.mark.parametrize("context", AROUND_BACKWARDS)
def test_a_context_around_the_backward_alone(context: str, executor: Executor) -> None:
    for name in ("declared", "hidden", "constants", "joint", "list-with-formulas", "adopted-attributes"):
        row = SUBJECTS[name]
        row.operator.forget_calls()
        expected = values_and_gradients(row.plain, row.inputs())[1]
        for _ in range(CALLS):
            leaves = [each.requires_grad_() for each in row.inputs()]
            loss = loss_of(row.call(*leaves))
            with AROUND_BACKWARDS[context]():
                assert_close(torch.autograd.grad(loss, leaves), expected)


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("subject", ["swap", "cycle", "rotate", "momentum"])
def test_inductor_writes_the_inputs_of_a_graph(subject: str) -> None:
    row = SUBJECTS[subject]
    given = [each.clone() for each in row.inputs()]
    torch.compile(row.operator.__call__, fullgraph=True)(*given)
    torch.compiler.reset()
    assert_close(tuple(given), row.plain(*row.inputs()))


@pytest.mark.parametrize("subject", [name for name, each in SUBJECTS.items() if each.applied is not None])
def test_a_class_gives_what_apply_gives(subject: str) -> None:
    row = SUBJECTS[subject]
    for _ in range(CALLS):
        assert_close(
            values_and_gradients(row.call, row.inputs()), values_and_gradients(row.applied, row.inputs())
        )
