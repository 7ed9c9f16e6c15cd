"""A mistake of the check's own is raised: it is never told as the operator's fault, nor lost."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith
from opsmith import errors
from opsmith.checking.exceptions import Overlooking, WrongFormError, refuse_own
from opsmith.checking.run import LiveCall
from opsmith.checking.side_effects.interleavings import InterruptedOperationError
from opsmith.checking.subject import Subject
from opsmith.judging.attribution import calls_operator

HOME = Path(opsmith.__file__).parent / "checking"

EXCUSED = {
    "numerics/directional.py": "a step that raises is where the function ends",
    "output/replay.py": "a script that is run reports what it raises",
    "processes/child.py": "an answer that cannot be pickled is sent in a plainer form",
    "processes/fork.py": "the child passes on to the parent what was raised",
    "processes/workers.py": "the child passes on to the parent what was raised",
    "processes/sanitizer_child.py": "the child passes on to the parent what was raised",
    "side_effects/outside_state.py": "whatever is raised means that the operator needs what it remembers",
    "side_effects/interleavings.py": "a thread passes on what was raised to the one that started it",
}
"""Modules that catch every exception and attribute none, and why."""

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


def test_every_broad_handler_attributes_the_exception() -> None:
    found = [
        f"{file.relative_to(HOME)}:{handler.lineno}"
        for file in sorted(HOME.rglob("*.py"))
        if file.relative_to(HOME).as_posix() not in EXCUSED
        for handler in catching(file)
        if not re.search(r"refuse_own\(|raise", ast.unparse(handler))
    ]
    assert found == []


def test_nothing_suppresses_every_exception() -> None:
    found = [
        str(file.relative_to(HOME))
        for file in sorted(HOME.rglob("*.py"))
        if re.search(r"suppress\((Base)?Exception\)", file.read_text("utf-8"))
    ]
    assert found == [], "use `Overlooking()` of checking/exceptions.py"


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
    "error",
    [
        WrongFormError("y", "1 tensor", "the reference 2", "here"),
        errors.UsageError("no"),
        InterruptedOperationError("add"),
    ],
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


@pytest.mark.parametrize("name", EXCUSED)
def test_an_excused_module_has_a_broad_handler(name: str) -> None:
    assert [*catching(HOME / name)]


@pytest.mark.every(8)
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

    wrong, right = mistaken(), LiveCall.backward

    def backward(self: LiveCall, *args: Any, **options: Any) -> Any:
        alone = threading.current_thread() is threading.main_thread()
        return right(self, *args, **options) if alone else wrong()

    monkeypatch.setattr(LiveCall, "backward", backward)
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


@pytest.mark.slow
@pytest.mark.every(5)
@pytest.mark.parametrize(("checked", "cause"), [(Growing, "stale-state"), (Shrinking, "mutates-input")])
def test_what_has_another_form_each_time_is_a_finding_and_no_mistake(checked: Any, cause: str) -> None:
    skip = ["compile", "export", "opcheck"]
    report = opsmith.check(checked, samples=[(torch.rand(3, 4),)], effort="quick", skip=skip)
    assert cause in {failure.cause for failure in report.failures}
