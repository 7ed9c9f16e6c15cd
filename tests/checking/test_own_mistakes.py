"""A mistake of the check's own is raised: it is never told as the operator's fault, nor lost."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith
from opsmith import errors
from opsmith.checking.calls import Alive
from opsmith.checking.exceptions import Overlooking, WrongCountError, calls_operator, refuse_own
from opsmith.checking.side_effects.interleavings import InterruptedOperationError
from opsmith.checking.subject import Subject

HOME = Path(opsmith.__file__).parent / "checking"

ANSWERS = {
    "sanitizing/child.py": "it hands on what was raised, from the child to the parent",
    "forgetting.py": "whatever is raised says that the operator needs what it remembers",
    "in_threads.py": "it hands on what was raised, from a thread to whoever started it",
    "isolation.py": "it hands on what was raised, from the child to the parent",
    "line.py": "what a step is rejected with is where the function ends, though it ends in other results",
    "replay.py": "a script that is run says what it raises",
    "replaying.py": "the failure that a replay is made for may be this one",
}
"""Modules that catch everything and ask nothing, and why."""

MISTAKE = "def wrong(*args, **options): {}"
"""A function whose frame lies in the package, as that of a real mistake does."""

BODIES = {
    "KeyError": "raise KeyError(7)",
    "RuntimeError": "raise RuntimeError(7)",
    "TypeError": "setattr(int, '7', 7)",
    "ValueError": "int('7.0')",
}
"""Mistakes, each raised by the line itself or by compiled code that it calls."""


class Square(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def mistaken(name: str = "KeyError", file: str = "mistake.py") -> Any:
    space: dict[str, Any] = {}
    exec(compile(MISTAKE.format(BODIES[name]), str(HOME / file), "exec"), space)
    return space["wrong"]


def catching(file: Path) -> Iterator[ast.ExceptHandler]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ExceptHandler) and (
            node.type is None or {"Exception", "BaseException"} & {*map(ast.unparse, ast.walk(node.type))}
        ):
            yield node


@pytest.mark.parametrize("file", sorted(HOME.rglob("*.py")), ids=lambda file: str(file.relative_to(HOME)))
def test_whoever_catches_everything_asks_whose_it_is(file: Path) -> None:
    for handler in catching(file):
        body = ast.unparse(handler)
        assert file.relative_to(HOME).as_posix() in ANSWERS or "refuse_own(" in body or "raise" in body, (
            f"line {handler.lineno}"
        )


@pytest.mark.parametrize("file", sorted(HOME.rglob("*.py")), ids=lambda file: str(file.relative_to(HOME)))
def test_nobody_suppresses_everything(file: Path) -> None:
    calls = [node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Call)]
    broad = {"suppress(Exception)", "suppress(BaseException)"}
    assert not broad & {*map(ast.unparse, calls)}, "take `mistakes.Overlooking()`"


@pytest.mark.parametrize("name", BODIES)
def test_a_mistake_is_known_by_where_it_is_raised(name: str) -> None:
    with pytest.raises(Exception, match="7") as caught:
        mistaken(name)()
    assert type(caught.value).__name__ == name
    with pytest.raises(type(caught.value), match="7"):
        refuse_own(caught.value)
    with pytest.raises(type(caught.value), match="7"), Overlooking():
        mistaken(name)()


@pytest.mark.parametrize(
    "error", [WrongCountError("y", 1, 2, "here"), errors.UsageError("no"), InterruptedOperationError("add")]
)
def test_what_is_raised_about_the_operator_is_no_mistake(error: Exception) -> None:
    space: dict[str, Any] = {"error": error}
    exec(compile("def told(): raise error", str(HOME / "told.py"), "exec"), space)
    with pytest.raises(type(error)):
        space["told"]()
    refuse_own(error)


@pytest.mark.parametrize("name", BODIES)
def test_what_is_raised_where_the_operator_is_called_is_the_operators(name: str) -> None:
    with pytest.raises(Exception, match="7") as caught:
        calls_operator(mistaken(name, "calling.py"))()
    refuse_own(caught.value)
    with Overlooking():
        calls_operator(mistaken(name, "calling.py"))()


def test_an_operator_that_runs_out_of_items_within_a_generator_is_no_mistake() -> None:
    space: dict[str, Any] = {}
    exec(compile("def told(call): yield call()", str(HOME / "told.py"), "exec"), space)
    with pytest.raises(RuntimeError, match="generator raised StopIteration") as caught:
        next(space["told"](lambda: next(iter([]))))
    refuse_own(caught.value)


@pytest.mark.parametrize("name", ANSWERS)
def test_who_need_not_ask_does_catch_everything(name: str) -> None:
    assert [*catching(HOME / name)]


@pytest.mark.parametrize("kind", ["KeyError", "RuntimeError"])
@pytest.mark.parametrize("nth", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["fake", "forward", "gradient", "layouts", "linearity", "values", "vmap"])
def test_a_mistake_in_some_call_ends_the_check(
    name: str, nth: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong, right, calls = mistaken(kind), Subject.call, 0

    def call(self: Subject, sample: Any, flat: Any) -> list[Any]:
        nonlocal calls
        calls += 1
        return wrong() if calls == nth else right(self, sample, flat)

    monkeypatch.setattr(Subject, "single_precision", False)  # what it is raised for there is left to others
    monkeypatch.setattr(Subject, "call", call)
    with pytest.raises(Exception, match="7") as caught:
        opsmith.check(Square, samples=[(torch.rand(2, 3),)], effort="quick", only=[name])
    assert type(caught.value).__name__ == kind


def test_a_mistake_in_a_thread_ends_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    wrong, right = mistaken(), Alive.backward

    def backward(self: Alive, *args: Any, **options: Any) -> Any:
        alone = threading.current_thread() is threading.main_thread()
        return right(self, *args, **options) if alone else wrong()

    monkeypatch.setattr(Alive, "backward", backward)
    with pytest.raises(KeyError, match="7"):
        opsmith.check(Square, samples=[(torch.rand(2, 3),)], effort="quick", only=["state"])


class Growing(Function):
    """It returns one row more each other time."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Growing.calls += 1
        ctx.rows = 1 + Growing.calls % 2
        return x[: ctx.rows].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.cat([grad, grad.new_zeros(3 - ctx.rows, grad.shape[1])])


class Shrinking(Function):
    """It lays another tensor under its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * 2
        x.data = x.data[:1]
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


@pytest.mark.parametrize(("checked", "cause"), [(Growing, "nondeterministic"), (Shrinking, "mutates-input")])
def test_what_has_another_form_each_time_is_a_finding_and_no_mistake(checked: Any, cause: str) -> None:
    skip = ["compile", "export", "opcheck"]
    report = opsmith.check(checked, samples=[(torch.rand(3, 4),)], effort="quick", skip=skip)
    assert cause in {failure.cause for failure in report.failures}
