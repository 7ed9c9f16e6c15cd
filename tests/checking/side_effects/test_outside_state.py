"""State outside of calls is reported where calls change it, hides nothing else, and is restored."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith
from opsmith.checking.effort import EFFORTS
from opsmith.checking.side_effects import outside_state
from opsmith.checking.side_effects.outside_state import HiddenState, OutsideState
from opsmith.checking.subject_kinds import subject_of
from opsmith.core.reachable import CONTAINERS, Reached

X = torch.linspace(-2, 2, 12).view(4, 3) + 0.013
ONLY = ["forward", "gradient", "determinism", "effects", "state"]

MEAN = torch.zeros(3)
REBOUND = torch.zeros(3)


class Counts(Function):
    """Writes statistics into a global, and does not use them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        MEAN.mul_(0.9).add_(0.1 * x.float().mean(0))
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad


class Rebinds(Counts):
    """Gives a global another tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        global REBOUND
        REBOUND = 0.9 * REBOUND + 0.1 * x.float().mean(0)
        return 2 * x


class Centres(Counts):
    """Uses statistics of a global."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        centred = x - MEAN
        MEAN.mul_(0.9).add_(0.1 * x.mean(0))
        return 2 * centred


class CentresByClass(Counts):
    """Uses statistics of the class."""

    mean = torch.zeros(3)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        centred = x - CentresByClass.mean
        CentresByClass.mean = 0.9 * CentresByClass.mean + 0.1 * x.float().mean(0)
        return 2 * centred


class CentresByDict(Counts):
    """Uses statistics of a dictionary."""

    kept: ClassVar[dict[str, Tensor]] = {}

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mean = CentresByDict.kept.get("mean", torch.zeros(3))
        CentresByDict.kept["mean"] = 0.9 * mean + 0.1 * x.mean(0)
        return 2 * (x - mean)


class Norm(torch.nn.Module):
    """Holds the running mean of a class that reaches it as a global."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))


NORM = Norm()


class CentresByModule(Counts):
    """Uses statistics of a module in a global."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mean = NORM.get_buffer("mean")
        centred = x - mean
        mean.mul_(0.9).add_(0.1 * x.mean(0))
        return 2 * centred


class WarmsUp(Counts):
    """Scales by the number of calls so far."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        WarmsUp.calls += 1
        return 2 * x + 1 / WarmsUp.calls


class Precomputes(Counts):
    """Keeps what it has computed, which is the same in each call."""

    table: ClassVar[dict[int, Tensor]] = {}

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.shape[-1] not in Precomputes.table:
            Precomputes.table[x.shape[-1]] = torch.full((), 2.0)
        return x * Precomputes.table[x.shape[-1]]


def faults(found: opsmith.Report) -> set[tuple[str, str]]:
    return {(each.property, each.cause) for each in found.failures}


def check(function_class: type[Function], **options: Any) -> opsmith.Report:
    return opsmith.check(function_class, samples=[(X,)], only=ONLY, effort="quick", **options)


@pytest.mark.parametrize("function_class", [Counts, Rebinds])
def test_statistics_that_nothing_uses_are_a_side_effect(function_class: type[Function]) -> None:
    found = check(function_class)
    assert faults(found) == {("effects", "side-effect")}, str(found)
    assert "of the module" in found.failures[0].message


@pytest.mark.slow
@pytest.mark.parametrize(
    "function_class",
    [Centres, CentresByClass, CentresByDict, CentresByModule, WarmsUp],
    ids=lambda c: c.__name__,
)
def test_statistics_that_calls_use_are_stale_and_hide_nothing_else(function_class: type[Function]) -> None:
    wrong = type(f"{function_class.__name__}AndWrong", (function_class,), {"backward": staticmethod(thrice)})
    right = check(function_class)
    assert ("state", "stale-state") in faults(right), str(right)
    assert faults(right) <= {("state", "stale-state"), ("effects", "side-effect")}, str(right)
    assert any(
        "for each" in remark and "two runs give different numbers" in remark for remark in right.remarks
    ), right.remarks
    assert ("gradient", "scale") in faults(check(wrong))


def thrice(ctx: Any, grad: Tensor) -> Any:
    return 3 * grad


@pytest.mark.slow
def test_the_report_names_what_begins_anew() -> None:
    (remark,) = check(Centres).remarks
    named = f"with fresh copies of `MEAN` of the module `{__name__}` for each call"
    assert remark == f"two runs give different numbers; the other properties ran {named}"
    (remark,) = check(CentresByDict).remarks
    assert remark.endswith("the other properties ran with the operator's state restored before each call")


@pytest.mark.slow
def test_the_author_gets_the_state_back() -> None:
    before = MEAN.clone()
    kept = REBOUND
    check(Centres, skip=None)
    check(Rebinds)
    assert torch.equal(MEAN, before)
    assert REBOUND is kept
    assert WarmsUp.calls == (check(WarmsUp) and WarmsUp.calls)


def test_a_table_that_is_computed_once_is_right() -> None:
    found = check(Precomputes)
    assert not found.failures, str(found)
    assert not found.remarks


@pytest.mark.slow
def test_what_calls_leave_behind_is_not_called_nondeterministic() -> None:
    found = check(Centres)
    assert "nondeterministic" not in {each.cause for each in found.failures}, str(found)
    (failure,) = [each for each in found.failures if each.property == "state"]
    assert "each changes `MEAN` of the module" in failure.message
    assert "If both calls begin with the same state, the results agree" in failure.message


LOOKUP = torch.zeros(20)


class LooksUp(Counts):
    """Reads a large table and small statistics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x + LOOKUP[0] + 0 * MEAN


def test_a_table_too_large_to_copy_leaves_room_for_small_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside_state, "LARGE", 10)
    state = OutsideState.of(subject_of(LooksUp, [(X,)], 0, EFFORTS["quick"]).functions, 10)
    before = MEAN.clone()
    MEAN.add_(1)
    state.restore()
    assert torch.equal(MEAN, before)


KEPT: list[Any] = [{"a": 1}, [1], {1}, deque([1])]


def test_every_container_is_tried() -> None:
    assert {type(value) for value in KEPT} == set(CONTAINERS)


@pytest.mark.parametrize("value", KEPT, ids=lambda value: type(value).__name__)
def test_what_a_container_holds_is_named_put_away_and_put_back(value: Any) -> None:
    memory = HiddenState((Reached("`cache`", value),))
    before = value.copy()
    assert memory.filled() == ["`cache`"]
    with memory.away():
        assert not value
        assert memory.filled() == []
    assert value == before


LOCAL = threading.local()


class WarmsUpInThreads(Counts):
    """Scales by the number of calls of its thread so far."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        LOCAL.calls = getattr(LOCAL, "calls", 0) + 1
        return 2 * x + 1 / LOCAL.calls


def test_the_state_of_a_thread_is_restored_too() -> None:
    found = check(WarmsUpInThreads)
    assert ("state", "stale-state") in faults(found), str(found)
    assert all(each.status != "skipped" for each in found.outcomes if each.property == "gradient"), str(found)


def test_numbers_that_are_added_to_a_gradient_of_a_module_are_seen_and_restored() -> None:
    NORM.weight = torch.nn.Parameter(torch.ones(3))
    NORM.weight.grad = torch.zeros(3)
    state = OutsideState.of(subject_of(CentresByModule, [(X,)], 0, EFFORTS["quick"]).functions)
    NORM.weight.grad += 1
    ((name, change),) = state.changes()
    assert "NORM" in name
    assert change.startswith("its `weight` changed: its `.grad` was written")
    state.restore()
    assert torch.equal(NORM.weight.grad, torch.zeros(3))
    del NORM.weight
