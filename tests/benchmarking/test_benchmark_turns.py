"""Turns on a clock of the test's own: who is called how often, in which order, and what is never timed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from opsmith import errors
from opsmith.benchmarking import timing as clock
from opsmith.benchmarking.timing import (
    EFFORTS,
    BenchmarkEffort,
    CudaClock,
    ProcessorClock,
    TimedCall,
    clock_of,
    effort_named,
    time_in_turns,
)

EFFORT = BenchmarkEffort("quick", (), 4, 9, 0.01, 1e9, 1.0)


class Told:
    """A clock that each call tells how long it took."""

    def __init__(self) -> None:
        self.now, self.turns = 0.0, []  # type: ignore[var-annotated]
        self.log: list[str] = []
        self.interrupted = 0

    def interruptions(self) -> int:
        return self.interrupted

    def seconds(self, calls: list[Callable[[], object]]) -> float:
        start = self.now
        for call in calls:
            call()
        self.turns.append(len(calls))
        return self.now - start

    def settle(self) -> None:
        self.log.append("settle")

    def contestant(self, name: str, *costs: float) -> TimedCall:
        every = iter(lambda: None, 0) if not costs else None
        assert every is None
        left = list(costs)

        def call() -> None:
            self.log.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return TimedCall(call)


def test_each_has_a_turn_in_every_round_and_is_told_its_time() -> None:
    clock = Told()
    found = time_in_turns(
        {"one": clock.contestant("one", 0.1), "two": clock.contestant("two", 0.2)}, clock, EFFORT, 0
    )
    assert found["one"].seconds == pytest.approx([0.1] * 4)
    assert found["two"].seconds == pytest.approx([0.2] * 4)
    assert (found["one"].calls, found["two"].calls) == (1, 1)


def test_the_order_within_rounds_changes_and_follows_the_seed() -> None:
    def order(seed: int) -> list[str]:
        clock = Told()
        time_in_turns(
            {name: clock.contestant(name, 0.1) for name in "abc"}, clock, replace(EFFORT, least=8), seed
        )
        called = [name for name in clock.log if name != "settle"][3:]  # after finding out how many calls
        return called[::2]

    assert order(1) == order(1)
    rounds = {tuple(order(1)[at : at + 3]) for at in range(0, 24, 3)}
    assert len(rounds) > 1
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)


def test_short_calls_are_made_so_often_that_a_turn_takes_its_time() -> None:
    clock = Told()
    found = time_in_turns({"short": clock.contestant("short", 1e-5)}, clock, EFFORT, 0)
    assert found["short"].calls * 1e-5 >= EFFORT.turn_s
    assert found["short"].seconds == pytest.approx([1e-5] * 4)


def test_one_call_before_each_turn_does_not_count() -> None:
    clock = Told()
    slow_first = clock.contestant("cold", 0.1, 5.0, 0.1, 5.0, 0.1, 5.0, 0.1, 5.0, 0.1)
    found = time_in_turns({"cold": slow_first}, clock, EFFORT, 0)
    assert found["cold"].seconds == pytest.approx([0.1] * 4)


def test_more_rounds_are_run_while_times_are_unsteady_and_no_more_than_there_may_be() -> None:
    steady, unsteady = Told(), Told()
    few = time_in_turns({"a": steady.contestant("a", 0.1)}, steady, EFFORT, 0)
    costs = [0.1 * (1 + at % 7) for at in range(99)]
    many = time_in_turns({"a": unsteady.contestant("a", *costs)}, unsteady, EFFORT, 0)
    assert (len(few["a"].seconds), len(many["a"].seconds)) == (EFFORT.least, EFFORT.most)
    none_left = time_in_turns(
        {"a": unsteady.contestant("a", *costs)}, unsteady, replace(EFFORT, budget_s=0.0), 0
    )
    assert len(none_left["a"].seconds) == EFFORT.least


def test_what_a_call_uses_up_is_made_before_the_turn_and_no_more_than_there_is_room_for() -> None:
    clock, made = Told(), []

    def prepare() -> Callable[[], None]:
        made.append(clock.now)
        clock.now += 7.0  # which no time holds

        def use() -> None:
            clock.now += 1e-4

        return use

    found = time_in_turns({"b": TimedCall(lambda: None, prepare, room=5)}, clock, EFFORT, 0)
    assert found["b"].calls == 5
    assert found["b"].seconds == pytest.approx([1e-4] * 4)
    assert max(clock.turns) == 5


def test_a_turn_in_which_another_program_ran_is_taken_again() -> None:
    lost = [5.0, 4.0, 0.0, 0.0, 0.0, 9.0, 8.0, 7.0, 6.0]  # by each turn, to other programs

    class Interrupted(Told):
        def seconds(self, calls: list[Callable[[], object]]) -> float:
            taken = super().seconds(calls)
            if len(self.turns) == 1 or len(self.turns) % 2 == 0:  # finding out how many calls; not timed
                return taken
            more = lost.pop(0)
            self.now += more
            self.interrupted += more > 0
            return taken + more

    clock = Interrupted()
    found = time_in_turns({"a": clock.contestant("a", 0.1)}, clock, replace(EFFORT, most=4), 0)
    assert found["a"].seconds == pytest.approx([0.1, 0.1, 0.1, 6.1])
    assert lost == []


def test_the_processor_counts_what_is_not_asked_for() -> None:
    clock = ProcessorClock()
    before = clock.interruptions()
    time.sleep(0.001)  # which is asked for
    assert isinstance(before, int)
    assert clock.interruptions() >= before
    assert CudaClock(torch.device("cuda")).interruptions() == 0


def test_no_garbage_is_collected_meanwhile_and_it_is_again_afterwards() -> None:
    seen = []
    for collecting in (True, False):
        (gc.enable if collecting else gc.disable)()
        try:
            time_in_turns(
                {"a": TimedCall(lambda: seen.append(gc.isenabled()))},
                ProcessorClock(),
                replace(EFFORT, turn_s=0.0),
                0,
            )
            assert gc.isenabled() is collecting
        finally:
            gc.enable()
    assert set(seen) == {False}


def test_the_processor_waits_for_threads_to_rest_only_where_there_are_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    for count in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        ProcessorClock().settle()
    assert slept == [clock.PAUSE_S]


def test_clocks_by_device() -> None:
    assert isinstance(clock_of(torch.device("cpu")), ProcessorClock)
    assert isinstance(clock_of(torch.device("cuda")), CudaClock)


def test_efforts() -> None:
    assert list(EFFORTS) == ["quick", "default", "thorough"]
    assert EFFORTS["quick"].most < EFFORTS["default"].most < EFFORTS["thorough"].most
    with pytest.raises(errors.UsageError, match="there is no such level of effort") as raised:
        effort_named("lazy")
    assert raised.value.expected == "`quick`, `default`, `thorough`"


@pytest.mark.gpu
def test_a_gpu_is_timed_by_events() -> None:
    x = torch.randn(1 << 24, device="cuda")
    clock = clock_of(x.device)
    clock.settle()
    clock.seconds([lambda: x + 1])  # the first launch of a process loads its kernel
    one, ten = clock.seconds([lambda: x + 1]), clock.seconds([lambda: x + 1] * 10)
    assert 0 < one < ten
