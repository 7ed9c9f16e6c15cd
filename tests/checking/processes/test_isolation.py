"""A kernel that kills its process, or never returns, is a finding where a check is isolated."""

import ctypes
import errno
import fcntl
import gc
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.checking import Failure, Outcome
from opsmith.checking.processes import fork
from opsmith.checking.processes.child import SIGNALS
from opsmith.checking.processes.fork import announce, run_isolated

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is isolated where there is no fork")

FAST = ["forward", "gradient"]
HERE = f"{__file__}:1"


def line_of(words: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return 1 + next(number for number, line in enumerate(lines) if words in line)


def crash() -> Outcome:
    announce(lambda: "sample 0 (x [3])")
    ctypes.string_at(0)  # a segmentation fault
    raise AssertionError("it is over")


def hang() -> Outcome:
    announce(lambda: "sample 1 (x [5])")
    while True:
        time.sleep(1)  # for ever


def abort() -> Outcome:
    sys.stdout.write("heap overwritten, good night\n")
    os.abort()


def leave() -> Outcome:
    os._exit(3)


def leave_politely() -> Outcome:
    sys.exit(4)


def run(work: Any, limit_s: float = 600.0) -> Failure:
    outcome = run_isolated("forward", work, where=HERE, limit_s=limit_s)
    assert (outcome.property, outcome.status) == ("forward", "failed")
    assert outcome.seconds > 0
    (failure,) = outcome.failures
    assert (failure.property, failure.cause) == ("forward", "raises")
    return failure


def test_a_segmentation_fault_is_told_with_its_sample_and_its_line() -> None:
    failure = run(crash)
    assert failure.message == (
        "the process dies of SIGSEGV (a segmentation fault: it used memory outside of its own memory), on "
        "sample 0 (x [3])"
    )
    assert failure.where == f"{__file__}:{line_of('# a segmentation fault')}"
    assert failure.evidence == {"sample": "sample 0 (x [3])", "signal": "SIGSEGV"}


@pytest.mark.slow
def test_a_hang_is_told_with_its_sample_and_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork, "GRACE_S", 2.0)
    failure = run(hang, limit_s=2.0)
    assert failure.message == "it did not finish within 2 s, on sample 1 (x [5])"
    assert failure.where == f"{__file__}:{line_of('# for ever')}"
    assert failure.evidence["limit"] == "2 s"


def wait() -> Outcome:
    time.sleep(1.0)
    return Outcome("forward", "passed")


def spin() -> Outcome:
    while True:
        pass


@pytest.mark.slow
def test_a_limit_of_processor_time_counts_no_time_of_waiting() -> None:
    waited = run_isolated("forward", wait, where=HERE, processor_limit_s=0.9)
    assert waited.status == "passed"
    (failure,) = run_isolated("forward", spin, where=HERE, processor_limit_s=0.3).failures
    assert (
        failure.message == "the property did not finish within 0.3 s of processor time, before any sample ran"
    )
    assert failure.evidence["limit"] == "0.3 s of processor time"


def test_an_abort_is_told_with_its_last_words() -> None:
    failure = run(abort)
    assert failure.message == (f"the process dies of SIGABRT ({SIGNALS['SIGABRT']}), before any sample ran")
    assert failure.evidence == {"signal": "SIGABRT", "stderr": "heap overwritten, good night"}


@pytest.mark.parametrize(("work", "status"), [(leave, 3), (leave_politely, 4)])
def test_leaving_the_process_is_told_with_its_status(work: Any, status: int) -> None:
    failure = run(work)
    assert failure.message.startswith(
        f"the operator ends the process with status {status}, instead of returning"
    )
    assert failure.evidence == {"status": status}
    assert failure.where == HERE


def test_an_outcome_comes_back_whole_and_what_was_printed_too(capsys: pytest.CaptureFixture[str]) -> None:
    sent = Outcome(
        "forward",
        "failed",
        seconds=0.5,
        failures=(Failure("forward", "x", "sign", "m", evidence={"tensor": torch.ones(2), "at": (1, 2)}),),
        notes=("one",),
    )

    def work() -> Outcome:
        sys.stdout.write("by the way\n")
        return sent

    received = run_isolated("forward", work, where=HERE)
    assert received.failures[0].evidence["at"] == (1, 2)
    assert received.failures[0].evidence["tensor"].tolist() == [1.0, 1.0]
    assert (received.notes, received.seconds, received.status) == (sent.notes, 0.5, "failed")
    assert capsys.readouterr() == ("", "by the way\n")


def test_evidence_that_cannot_be_sent_is_sent_as_text() -> None:
    sent = Outcome(
        "forward", "failed", failures=(Failure("forward", "x", "sign", "m", evidence={"by": lambda: 0}),)
    )
    received = run_isolated("forward", lambda: sent, where=HERE)
    assert "<lambda>" in received.failures[0].evidence["by"]


def test_a_mistake_of_ours_is_raised_here_with_the_place_where_it_was_made() -> None:
    def work() -> Outcome:
        raise KeyError("ours")

    with pytest.raises(KeyError, match="ours") as raised:
        run_isolated("forward", work, where=HERE)
    assert "in work" in raised.value.__notes__[0]


def test_several_threads_of_the_parent_do_not_hang_the_child() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        big = torch.rand(600, 600, requires_grad=True)
        (big @ big).exp().sum().backward()  # wakes the threads of OpenMP and of the matrix library
        torch.rand(4_000_000).sum()

        def work() -> Outcome:
            other = torch.rand(600, 600, requires_grad=True)
            (other @ other).exp().sum().backward()
            torch.rand(4_000_000).sum()
            return Outcome("forward", "passed", notes=(str(torch.get_num_threads()),))

        outcome = run_isolated("forward", work, where=HERE, limit_s=600)
    finally:
        torch.set_num_threads(before)
    assert (outcome.status, outcome.notes) == ("passed", ("1",))


def test_nothing_is_left_of_a_child_and_of_what_it_started(tmp_path: Path) -> None:
    def work() -> Outcome:
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10**6)"])
        (tmp_path / "pid").write_text(str(left.pid))
        return Outcome("forward", "passed")

    assert run_isolated("forward", work, where=HERE).status == "passed"
    pid = int((tmp_path / "pid").read_text())
    while alive(pid):  # it would sleep for days
        time.sleep(0.01)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@opsmith.operator("isolation::sinking")
def sinking(x: Tensor) -> Tensor:
    return x * 2


@sinking.kernel("cpu")
def _(x: Tensor) -> Tensor:
    if x.shape[0] == 5:
        ctypes.string_at(0)  # where it sinks
    return x * 2


sinking.gradients(x=lambda grad: grad * 2)
sinking.samples(lambda make: [(make(3),), (make(5),)])


def test_check_goes_on_after_a_kernel_has_died() -> None:
    told: list[str] = []
    report = opsmith.check(sinking, only=FAST, isolate=30, progress=lambda *event: told.append(event[0]))
    outcomes = {outcome.property: outcome for outcome in report.outcomes}
    assert [outcomes[name].status for name in FAST] == ["failed", "passed"], str(report)  # on sample 0
    first = outcomes["forward"].failures[0]
    assert first.message.startswith("the process dies of SIGSEGV")
    assert "sample 1 (x [5])" in first.message
    assert first.where == f"{__file__}:{line_of('# where it sinks')}"
    assert "isolate=True" in str(first.replay), "the script is not to die of it"
    assert told[-1] == ""


def test_kernels_run_in_child_processes_alone(tmp_path: Path) -> None:
    """Inputs are derived by the reference: a kernel that damages memory or never returns ends nothing."""
    log = tmp_path / "processes"

    @opsmith.operator("isolation::traced")
    def traced(x: Tensor) -> Tensor:
        return x * 2

    @traced.kernel("cpu")
    def _(x: Tensor) -> Tensor:
        with log.open("a") as file:
            file.write(f"{os.getpid()} ")
        return x * 2

    samples = [(torch.ones(3),), (torch.ones(2, 3),)]
    report = opsmith.check(traced, samples=samples, only=["forward"], effort="quick", isolate=60)
    assert report.failures == (), str(report)
    processes = {int(each) for each in log.read_text().split()}
    assert processes
    assert os.getpid() not in processes


@opsmith.operator("isolation::shallow")
def shallow(x: Tensor) -> Tensor:
    return x * 2


@shallow.kernel("cpu")
def _(x: Tensor) -> Tensor:
    if x.numel() == 0:
        os.abort()  # for want of elements
    return x * 2


shallow.gradients(x=lambda grad: grad * 2)
shallow.samples(lambda make: [(make(3),)])


@pytest.mark.slow
def test_a_kernel_that_dies_of_a_derived_input_alone_is_a_finding() -> None:
    report = opsmith.check(shallow, only=["forward"], isolate=60)
    (failure,) = {each.message: each for each in report.outcomes[0].failures}.values()
    assert failure.message.startswith("the process dies of SIGABRT")
    assert "x [0]" in failure.message
    assert failure.where == f"{__file__}:{line_of('# for want of elements')}"


@pytest.mark.slow
def test_a_right_operator_passes_in_isolation_as_it_does_without() -> None:
    import opsmith.ops

    plain, alone = (opsmith.check(opsmith.ops.mul, only=FAST, isolate=how) for how in (False, True))
    assert alone.passed
    assert [(each.property, each.status, each.notes) for each in plain.outcomes] == [
        (each.property, each.status, each.notes) for each in alone.outcomes
    ]


class Sinking(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x * 2 if x.dim() == 9 else os._exit(7)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad


def test_a_class_that_ends_the_process_when_it_is_looked_at_is_reported() -> None:
    report = opsmith.check(Sinking, samples=[(torch.ones(2),)], isolate=30)
    assert report.outcomes[0].failures[0].evidence["status"] == 7
    assert {outcome.status for outcome in report.outcomes[1:]} == {"skipped"}
    assert not report.passed
    assert report.operator == "Sinking"


def test_a_wrong_call_is_the_same_error_in_isolation() -> None:
    with pytest.raises(errors.MissingSamplesError, match="there are no samples"):
        opsmith.check(sinking, samples=[], isolate=True)


@pytest.mark.parametrize("isolate", [0, -1.0, float("nan"), float("inf"), "yes"])
def test_a_limit_that_is_none_is_refused(isolate: Any) -> None:
    with pytest.raises(errors.UsageError, match="`isolate` must be a bool or a time limit"):
        opsmith.check(sinking, isolate=isolate)


def test_where_the_system_forks_no_process_isolation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    before = set(os.listdir("/dev/fd"))
    monkeypatch.setattr(os, "fork", fork)
    words = "the system cannot fork a process: Cannot allocate memory"
    with pytest.raises(errors.UsageError, match=words):
        run_isolated("forward", leave, where=HERE)
    assert set(os.listdir("/dev/fd")) == before


def test_without_fork_isolation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    with pytest.raises(errors.UsageError, match="where processes cannot be forked"):
        opsmith.check(sinking, isolate=True)


THREADED = """
import torch, opsmith.ops

class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.depth:
            with torch.enable_grad():
                Nested.apply(torch.ones(2, requires_grad=True), ctx.depth - 1).sum().backward()
        return grad, None

Nested.apply(torch.ones(2, requires_grad=True), 70).sum().backward()
with torch.no_grad():
    opsmith.check(opsmith.ops.mul, only=["gradient"], isolate=True)
"""


@pytest.mark.slow
def test_once_autograd_has_threads_isolation_is_refused() -> None:
    """torch starts them for a backward within 60 others, and computes no gradient in a fork after that."""
    done = subprocess.run([sys.executable, "-c", THREADED], capture_output=True, text=True)
    assert done.returncode == 1
    assert "a check cannot be isolated after autograd has started threads of its own" in done.stderr
    assert "got: Unable to handle autograd's threading" in done.stderr
    assert "backward_refusal" not in done.stderr, "where in the child it was found helps nobody"


def test_once_cuda_was_used_isolation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(errors.UsageError, match="isolated: CUDA has been used"):
        opsmith.check(sinking, isolate=True)


class Unforkable:
    """It waits for ever where it is destroyed in another process, as torch's process groups do."""

    def __init__(self) -> None:
        self.circle = self
        self.process = os.getpid()

    def __del__(self) -> None:
        while os.getpid() != self.process:
            time.sleep(1)


@pytest.mark.slow
def test_a_child_does_not_collect_the_garbage_of_its_parent() -> None:
    def collecting() -> Outcome:
        gc.collect()
        return Outcome("forward", "passed")

    enabled = gc.isenabled()
    gc.disable()
    try:
        Unforkable()
        assert run_isolated("forward", collecting, where=HERE, limit_s=30.0).status == "passed"
    finally:
        gc.collect()
        if enabled:
            gc.enable()


def test_a_process_with_many_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of files above 1023, as of a process with many workers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("the system allows no number above 1023")
    pair = socket.socketpair

    def pair_above() -> tuple[socket.socket, socket.socket]:
        ours, theirs = pair()
        above = socket.socket(fileno=fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, 1500))
        ours.close()
        return above, theirs

    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        monkeypatch.setattr(socket, "socketpair", pair_above)
        found = run_isolated("forward", lambda: Outcome("forward", "passed", 0.0), where=HERE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found.status == "passed"
