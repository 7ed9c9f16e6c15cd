"""Turns on a clock of the test's own: who is called how often, in which order, and what is never timed."""

from __future__ import annotations

import gc
import hashlib
import itertools
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from opsmith import errors
from opsmith.benchmarking import timing as clock
from opsmith.benchmarking.effort import EFFORTS, BenchmarkEffort, TimeBudget, effort_named
from opsmith.benchmarking.timing import CudaClock, ProcessorClock, TimedCall, clock_of, time_in_turns

EFFORT = BenchmarkEffort("quick", (), 4, 9, 0.01, 1e9, 0.0, 1.0)


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
        {"one": clock.contestant("one", 0.02), "two": clock.contestant("two", 0.03)}, clock, EFFORT, 0
    )
    assert found["one"].seconds == pytest.approx([0.02] * 4)
    assert found["two"].seconds == pytest.approx([0.03] * 4)
    assert (found["one"].calls, found["two"].calls) == (1, 1)


def test_the_order_within_rounds_changes_and_follows_the_seed() -> None:
    def order(seed: int) -> list[str]:
        clock = Told()
        time_in_turns(
            {name: clock.contestant(name, 0.02) for name in "abc"}, clock, replace(EFFORT, least=8), seed
        )
        called = [name for name in clock.log if name != "settle"][6:]  # after finding out how many calls
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
    slow_first = clock.contestant("cold", 0.05, 0.02, 5.0, 0.02, 5.0, 0.02, 5.0, 0.02, 5.0, 0.02)
    found = time_in_turns({"cold": slow_first}, clock, EFFORT, 0)
    assert found["cold"].seconds == pytest.approx([0.02] * 4)


def test_more_rounds_are_run_while_times_are_unsteady_and_no_more_than_there_may_be() -> None:
    steady, unsteady = Told(), Told()
    few = time_in_turns({"a": steady.contestant("a", 0.02)}, steady, EFFORT, 0)
    costs = [0.01 * (1 + at % 7) for at in range(99)]
    many = time_in_turns({"a": unsteady.contestant("a", *costs)}, unsteady, EFFORT, 0)
    assert (len(few["a"].seconds), len(many["a"].seconds)) == (EFFORT.least, EFFORT.most)
    none_left = time_in_turns(
        {"a": unsteady.contestant("a", *costs)}, unsteady, replace(EFFORT, budget_s=0.0), 0
    )
    assert len(none_left["a"].seconds) == clock.FEWEST < EFFORT.least


def test_no_round_is_begun_that_would_end_after_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    monkeypatch.setattr(time, "perf_counter", lambda: told.now)
    costs = [1.0 * (1 + at % 5) for at in range(99)]  # never steady
    found = time_in_turns({"a": told.contestant("a", *costs)}, told, replace(EFFORT, budget_s=17.0), 0)
    # Finding out how many calls took 1 second, and four rounds 2 + 3 + 4 + 5; a fifth may take 3.5.
    assert found["a"].seconds == pytest.approx((2.0, 3.0, 4.0, 5.0))


def test_half_of_the_time_is_enough_for_as_many_rounds_as_there_must_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = Told()
    monkeypatch.setattr(time, "perf_counter", lambda: told.now)
    costs = [1.0 * (1 + at % 5) for at in range(99)]
    for budget, rounds in ((29.0, EFFORT.least), (31.0, EFFORT.least + 1)):  # four rounds end after 15
        told.now = 0.0
        effort = replace(EFFORT, budget_s=budget)
        found = time_in_turns({"a": told.contestant("a", *costs)}, told, effort, 0)
        assert len(found["a"].seconds) == rounds


def test_a_long_call_is_neither_warmed_nor_taken_again() -> None:
    class Interrupted(Told):
        def interruptions(self) -> int:
            self.interrupted += 1
            return self.interrupted

    told = Interrupted()
    found = time_in_turns({"a": told.contestant("a", 1.0)}, told, EFFORT, 0)
    assert len(found["a"].seconds) == EFFORT.least
    assert told.turns == [1] * (1 + EFFORT.least)


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


def test_what_takes_long_to_make_ready_is_made_for_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a graph whose forward is slow, for a backward that is not."""
    told, made = Told(), []
    monkeypatch.setattr(time, "perf_counter", lambda: told.now)

    def prepare() -> Callable[[], None]:
        made.append(told.now)
        told.now += 0.1

        def use() -> None:
            told.now += 1e-5

        return use

    found = time_in_turns({"b": TimedCall(lambda: None, prepare)}, told, EFFORT, 0)
    assert found["b"].calls == 1
    assert found["b"].seconds == pytest.approx([1e-5] * EFFORT.least)
    assert len(made) == 2 + 2 * EFFORT.least  # one before each turn does not count


def test_a_turn_in_which_another_program_ran_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = [5.0, 4.0, 0.0, 0.0, 0.0, 9.0, 8.0, 7.0, 6.0]  # by each turn, to other programs

    class Interrupted(Told):
        def seconds(self, calls: list[Callable[[], object]]) -> float:
            taken = super().seconds(calls)
            if len(self.turns) <= 2 or len(self.turns) % 2:  # finding out how many calls; not timed
                return taken
            more = lost.pop(0)
            self.now += more
            self.interrupted += more > 0
            return taken + more

    clock = Interrupted()
    monkeypatch.setattr("opsmith.benchmarking.timing.RETRIED_S", 9.2)
    found = time_in_turns({"a": clock.contestant("a", 0.02)}, clock, replace(EFFORT, most=4), 0)
    assert found["a"].seconds == pytest.approx([0.02, 0.02, 0.02, 6.02])
    assert lost == []
    lost[:] = [5.0] * 4
    hasty = Interrupted()
    found = time_in_turns({"a": hasty.contestant("a", 0.02)}, hasty, replace(EFFORT, most=4, budget_s=0.0), 0)
    assert found["a"].seconds == pytest.approx([5.02] * 3)


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


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], None]:
    """Threads of the process as the system shows them, to be given a name and a state."""
    monkeypatch.setattr(clock, "THREADS", tmp_path)

    def thread(number: str, state: str) -> None:
        (tmp_path / number).mkdir(exist_ok=True)
        (tmp_path / number / "stat").write_text(f"{number} (named) R (so) {state} 1 2")

    thread(str(threading.get_native_id()), "R")
    thread("1000001", "S")
    return thread


def test_the_processor_waits_while_another_thread_runs(
    monkeypatch: pytest.MonkeyPatch, threads: Callable[[str, str], None], tmp_path: Path
) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            threads("1000002", "S")

    monkeypatch.setattr(clock, "PAUSE_S", 60.0)
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    ProcessorClock().settle()
    assert slept == []
    threads("1000002", "R")
    ProcessorClock().settle()
    assert slept == [clock.GLANCE_S] * 3
    (tmp_path / "1000002" / "stat").unlink()  # it ended
    ProcessorClock().settle()
    assert len(slept) == 3
    threads("1000002", "R")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    ProcessorClock().settle()
    assert len(slept) == 3


@pytest.mark.parametrize("known", [True, False], ids=["a thread never rests", "the system does not tell"])
def test_the_processor_waits_no_longer_than_threads_spin(
    known: bool, monkeypatch: pytest.MonkeyPatch, threads: Callable[[str, str], None], tmp_path: Path
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(clock, "PAUSE_S", 0.02)
    threads("1000002", "R")
    if not known:
        monkeypatch.setattr(clock, "THREADS", tmp_path / "none")
    ProcessorClock().settle()
    assert now[0] == pytest.approx(clock.PAUSE_S, abs=clock.GLANCE_S)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the states of threads are read on Linux")
def test_a_thread_that_computes_is_seen_until_it_ends() -> None:
    size, begun = 200_000, threading.Event()

    def compute() -> None:
        begun.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", size)  # without Python's lock

    other = threading.Thread(target=compute)
    other.start()
    begun.wait()
    time.sleep(0.01)
    seen = clock._other_threads_run()
    other.join()
    assert seen
    waits = itertools.count()
    while clock._other_threads_run():  # those of tests before may still look for work
        assert next(waits) < 6000
        time.sleep(0.01)


def test_clocks_by_device() -> None:
    assert isinstance(clock_of(torch.device("cpu")), ProcessorClock)
    assert isinstance(clock_of(torch.device("cuda")), CudaClock)


def test_efforts() -> None:
    assert list(EFFORTS) == ["quick", "default", "thorough"]
    assert EFFORTS["quick"].most < EFFORTS["default"].most < EFFORTS["thorough"].most
    with pytest.raises(errors.UsageError, match="there is no such level of effort") as raised:
        effort_named("lazy")
    assert raised.value.expected == "`quick`, `default`, `thorough`"


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that stands still until it is told how many seconds have passed."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return lambda seconds: now.append(now.pop() + seconds)


def test_the_time_of_a_benchmark_is_shared_out_among_what_is_left(passing: Callable[[float], None]) -> None:
    budget = TimeBudget(replace(EFFORT, budget_s=30.0), 2, 3, begun=94.0)  # a check took six seconds
    budget.begin_case()
    passing(2.0)  # to compile
    # 30 - 6 - 2 are left, 2 of them for what the other case does beside its rounds.
    assert budget.share(3) == pytest.approx(20 / 6)
    passing(1.0)
    budget.spend(1.0)
    assert budget.share(2) == pytest.approx(19 / 5)  # it needed less, and the others get the rest
    passing(7.0)
    budget.spend(7.0)
    assert budget.share(1) == pytest.approx(12 / 4)
    budget.begin_case()
    passing(5.0)
    assert budget.share(3) == pytest.approx(9 / 3)
    assert budget.rounds_s == 8.0


def test_rounds_have_their_time_however_long_a_compilation_takes(passing: Callable[[float], None]) -> None:
    budget = TimeBudget(replace(EFFORT, budget_s=30.0, rounds_s=9.0), 2, 3, begun=100.0)
    budget.begin_case()
    passing(60.0)
    assert budget.share(3) == pytest.approx(9 / 6)
    passing(4.0)
    budget.spend(4.0)
    assert budget.share(2) == pytest.approx(5 / 5)
    budget.spend(6.0)
    assert budget.share(1) == 0.0


@pytest.mark.gpu
def test_a_gpu_is_timed_by_events() -> None:
    x = torch.randn(1 << 24, device="cuda")
    clock = clock_of(x.device)
    clock.settle()
    clock.seconds([lambda: x + 1])  # the first launch of a process loads its kernel
    one, ten = clock.seconds([lambda: x + 1]), clock.seconds([lambda: x + 1] * 10)
    assert 0 < one < ten
