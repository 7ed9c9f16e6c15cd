"""A call that never returns is one finding, and soon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from functions import Doubled

import opsmith
from opsmith.checking.effort import EFFORTS
from opsmith.checking.exceptions import watched_calls
from opsmith.checking.processes import watchdog
from opsmith.checking.processes.watchdog import EndlessCallError, Watchdog, recursion
from opsmith.checking.subject_kinds import subject_of

X = [(torch.ones(2, 3),)]
FAST = ["forward", "gradient", "determinism", "memory"]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_pulse", watchdog.Pulse())
    monkeypatch.setattr(watchdog, "FIRST_S", 2.0)
    monkeypatch.setattr(watchdog, "LATER_S", 1.0)
    monkeypatch.setattr(watchdog, "POLL_S", 0.05)
    monkeypatch.setattr(watchdog, "AGAIN_S", 0.3)
    monkeypatch.setattr(watchdog, "PATIENCE_S", 1.0)


class EndlessForward(Doubled):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        while True:
            try:
                x = x + 1
            except Exception:  # handles what it likes
                continue


class EndlessBackward(Doubled):
    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        while True:
            pass


class WaitingForItself(Doubled):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        lock = threading.Lock()
        with lock, lock:
            return x * 2


class EndlessInOneLayout(Doubled):
    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        while not grad.is_contiguous():
            pass
        return grad * 2


@pytest.mark.every(4)
@pytest.mark.parametrize("endless", [EndlessForward, WaitingForItself])
@pytest.mark.parametrize("isolate", [False, 60])
def test_a_forward_that_never_returns_is_the_only_finding(endless: Any, isolate: Any) -> None:
    report = opsmith.check(endless, samples=X, effort="quick", isolate=isolate)
    (failure,) = report.failures
    assert (failure.property, failure.cause, failure.severity) == ("forward", "raises", "error")
    assert failure.message == "a call does not return"
    assert failure.evidence == {"sample": "sample 0 (x [2, 3])", "limit": "2 s"}
    assert failure.where is not None
    assert failure.where.startswith(__file__)
    assert {each.status for each in report.outcomes if each.property != "forward"} == {"skipped"}


@pytest.mark.slow
@pytest.mark.parametrize("isolate", [False, 60])
def test_after_two_hangs_nothing_else_runs(isolate: Any) -> None:
    report = opsmith.check(EndlessBackward, samples=X, effort="quick", isolate=isolate, only=FAST)
    first, second = report.failures
    assert first.follows is None
    assert second.follows == first.property
    skipped = {each.reason for each in report.outcomes if each.status == "skipped" and not each.left_out}
    assert skipped == {"not run: a call does not return (see `determinism` and `gradient`)"}


@pytest.mark.slow
def test_a_hang_in_one_layout_leaves_the_rest_to_be_checked() -> None:
    report = opsmith.check(EndlessInOneLayout, samples=X, effort="quick", only=[*FAST, "layouts"])
    (failure,) = report.failures
    assert failure.property == "layouts"
    assert all(each.status == "passed" for each in report.outcomes if each.property in FAST)


INSIDE_OF_ITSELF = """
import torch, opsmith

class Itself(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        x = torch.ones_like(grad, requires_grad=True)
        with torch.enable_grad():
            y = Itself.apply(x)
        return torch.autograd.grad(y, x, grad)[0]

options = {"effort": "quick", "isolate": 200, "only": ["determinism"]}
for failure in opsmith.check(Itself, samples=[(torch.ones(2),)], **options).failures:
    print(failure.message)
"""


@pytest.mark.slow
def test_a_backward_inside_of_itself_is_named_before_the_time_is_up(tmp_path: Path) -> None:
    """torch runs each 60th backward in a new thread, so that Python sees no recursion."""
    script = tmp_path / "itself.py"
    script.write_text(INSIDE_OF_ITSELF)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=150)
    assert done.stdout == "`Itself.backward` calls itself without end\n", done.stderr


def test_many_calls_inside_of_each_other_are_a_recursion() -> None:
    calls, others = [blocked.__code__] * watchdog.DEEP, [torch.autograd.grad.__code__] * 2 * watchdog.DEEP
    assert recursion([*calls, *others]) == "blocked"
    assert recursion([*calls[1:], *others]) == ""


class Looked:
    """A clock that goes by the watchdog's looks while `Timed` runs: it stands still beside a busy machine."""

    now = 0.0
    running = False

    @classmethod
    def monotonic(cls) -> float:
        if cls.running and threading.current_thread().name == "opsmith watchdog":
            cls.now += watchdog.POLL_S
        return cls.now


class Timed(Doubled):
    work: ClassVar[list[Callable[[], object]]] = []

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        Looked.running = True
        try:
            Timed.work[0]()
        finally:
            Looked.running = False
        return x * 2


def sleep() -> None:
    time.sleep(0.5)


def build() -> None:
    """Run another process once, as for a compiler."""
    if not Looked.now:
        subprocess.run([sys.executable, "-c", "import time; time.sleep(1)"], check=True)


@pytest.mark.parametrize(
    ("work", "limit", "seconds"),
    [pytest.param(sleep, "LATER_S", 0.05, marks=pytest.mark.slow), (build, "FIRST_S", 0.5)],
)
def test_a_slow_call_is_no_hang(
    work: Any, limit: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, limit, seconds)
    monkeypatch.setattr(watchdog, "time", Looked)
    monkeypatch.setattr(Looked, "now", 0.0)
    monkeypatch.setattr(Timed, "work", [work])
    report = opsmith.check(Timed, samples=X, effort="quick", only=["determinism"])
    assert report.passed_as_asked, str(report)
    assert Looked.now > seconds


class Clock:
    """The real clock, but for the time in which the process is suspended."""

    suspended = 0.0

    @classmethod
    def monotonic(cls) -> float:
        return time.monotonic() + cls.suspended


class Suspended(Doubled):
    """A call in which the system suspends the process, as a laptop that is closed."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        if not Clock.suspended:
            Clock.suspended = 1000.0
            time.sleep(0.3)
        return x * 2


def test_time_in_which_the_process_does_not_run_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "time", Clock)
    monkeypatch.setattr(Clock, "suspended", 0.0)
    report = opsmith.check(Suspended, samples=X, effort="quick", only=["determinism"])
    assert report.passed_as_asked, str(report)


def test_each_run_of_a_reference_is_a_call_of_its_own() -> None:
    """Finite differences run a forward many hundred times: that is no call that hangs."""
    subject = subject_of(Doubled, X, 0, EFFORTS["quick"])
    sample = subject.samples[0]
    watchdog._pulse.at = 0.0
    subject.reference(sample, sample.at())
    assert watchdog._pulse.at > 0.0
    assert watchdog._pulse.longest > 0.0


def blocked(end: threading.Event) -> None:
    end.wait()


@pytest.mark.slow
def test_what_cannot_be_stopped_is_given_up() -> None:
    """Python interrupts a wait in the main thread alone."""
    given_up: list[float] = []
    end = threading.Event()

    def give_up(seconds: float) -> None:
        given_up.append(seconds)
        end.set()

    def run() -> None:
        with suppress(EndlessCallError), Watchdog([blocked.__code__], give_up):
            blocked(end)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert given_up


def test_the_signal_is_handled_in_the_region_alone_and_left_to_others() -> None:
    number = watchdog.INTERRUPT
    with Watchdog([]):
        assert signal.getsignal(number) is not signal.SIG_DFL
    assert signal.getsignal(number) is signal.SIG_DFL
    signal.signal(number, signal.SIG_IGN)
    try:
        with Watchdog([]):
            assert signal.getsignal(number) is signal.SIG_IGN
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.slow
def test_the_interpreter_switches_threads_as_before() -> None:
    before = sys.getswitchinterval()
    with pytest.raises(EndlessCallError), Watchdog([blocked.__code__]):
        blocked(threading.Event())
    assert sys.getswitchinterval() == before


def test_a_child_that_reports_a_hang_is_ended() -> None:
    """Compiled code that holds the interpreter is ended by the time limit alone."""
    from opsmith.checking import Outcome
    from opsmith.checking.processes.fork import report_hang, run_isolated

    def work() -> Outcome:
        report_hang(7.5)
        os.read(os.pipe()[0], 1)
        raise AssertionError("it is over")

    (failure,) = run_isolated("forward", work, where=f"{__file__}:1").failures
    assert failure.message == "the property did not finish within 7 s, before any sample ran"


def test_code_under_a_profiler_runs_after_a_region() -> None:
    before = sys.getprofile()
    with watched_calls():
        pass
    sys.setprofile(lambda *event: None)
    try:
        found = [each for each in range(3) if str(each)]  # Python 3.11 hung here
    finally:
        sys.setprofile(before)
    assert found == [0, 1, 2]


def test_one_thread_watches_one_region_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "IDLE_S", 20.0)
    with Watchdog([]):
        pass
    while any(
        each.name == "opsmith watchdog" and each not in watchdog._idle for each in threading.enumerate()
    ):
        time.sleep(0.01)
    waiting = watchdog._idle[-1]
    with Watchdog([]):
        assert waiting not in watchdog._idle
        assert waiting.is_alive()


def _blocked_after_a_region(end: threading.Event) -> None:
    with Watchdog([]):
        pass  # its thread waits for the next region, while the one outside looks for calls
    blocked(end)


@pytest.mark.slow
def test_a_thread_that_waits_for_a_region_is_no_call_to_stop() -> None:
    with pytest.raises(EndlessCallError), Watchdog([blocked.__code__]):
        _blocked_after_a_region(threading.Event())
