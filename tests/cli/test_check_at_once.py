"""`opsmith check -j`: several operators at once, with the same reports in the same order."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

Run = Callable[..., Result]
Write = Callable[..., Path]

# A Ctrl-C strikes anywhere, in a callback of the garbage collector too, where Python warns and goes on.
IN_A_FINALISER = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

FAST = ("--quick", "--only", "forward", "--only", "gradient")

DYING = """
import os, signal, torch, opsmith
from torch import Tensor

def declared(name, body):
    @opsmith.operator("{space}::" + name)
    def one(x: Tensor) -> Tensor:
        body()
        return x * x

    one.gradients(x=lambda grad, x: 2 * grad * x)
    one.samples(lambda make: [(make(3),)])
    return one

first = declared("first", lambda: None)
killed = declared("killed", lambda: os.kill(os.getpid(), signal.SIGKILL))
left = declared("left", lambda: os._exit(0))
last = declared("last", lambda: None)
"""


def without_times(report: Any) -> Any:
    """A report in JSON, without what differs from run to run."""
    if isinstance(report, dict):
        return {key: without_times(value) for key, value in report.items() if not key.endswith("seconds")}
    return [without_times(each) for each in report] if isinstance(report, list) else report


def test_the_reports_are_those_of_one_after_the_other(opsmith: Run, write: Write) -> None:
    file = str(write())
    alone, at_once = (opsmith("check", file, "--json", *FAST, *more) for more in ((), ("-j", "2")))
    assert (at_once.exit_code, at_once.stderr) == (alone.exit_code, alone.stderr) == (1, "")
    assert without_times(json.loads(at_once.stdout)) == without_times(json.loads(alone.stdout))
    names = [report["operator"] for report in json.loads(at_once.stdout)["reports"]]
    assert [name.rpartition("::")[2] for name in names] == ["right", "wrong"]


def test_a_process_that_dies_loses_no_other_report(opsmith: Run, write: Write, space: str) -> None:
    done = opsmith("check", str(write(DYING)), "-j", "2", "--json", *FAST)
    read = json.loads(done.stdout)
    assert done.exit_code == 2
    assert [report["operator"] for report in read["reports"]] == [f"{space}::first", f"{space}::last"]
    assert all(report["passed"] for report in read["reports"])
    killed, left = read["unchecked"]
    assert (killed["operator"], left["operator"]) == (f"{space}::killed", f"{space}::left")
    assert "the process that checked the operator is gone: the process dies of SIGKILL" in killed["message"]
    assert "the operator ends the process with status 0, instead of returning" in left["message"]
    assert "opsmith check --isolate" in done.stderr


@pytest.mark.slow
def test_under_isolation_a_process_that_dies_is_a_finding(opsmith: Run, write: Write, space: str) -> None:
    done = opsmith("check", str(write(DYING)), "-j", "2", "--isolate", "--json", "--only", "forward")
    read = json.loads(done.stdout)
    assert (done.exit_code, read["unchecked"]) == (1, [])
    failing = [report["operator"] for report in read["reports"] if report["errors"]]
    assert failing == [f"{space}::killed", f"{space}::left"]


def test_what_cannot_be_checked_is_reported_as_without(opsmith: Run, write: Write, space: str) -> None:
    text = write().read_text().replace("wrong.samples(lambda make: [(make(3),)])", "")
    file = str(write(text))
    alone, at_once = (opsmith("check", file, *FAST, *more) for more in ((), ("-j", "2")))
    assert (at_once.exit_code, at_once.stderr) == (alone.exit_code, alone.stderr)
    assert at_once.exit_code == 2
    assert f"{space}::wrong" in at_once.stderr


@IN_A_FINALISER
def test_ctrl_c_prints_what_is_finished(
    opsmith: Run, write: Write, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opsmith import checking

    whole = checking.check

    def interrupted(operator: Any, **options: Any) -> Any:
        if operator.name.endswith("wrong"):
            os.kill(parent, signal.SIGINT)
            signal.pause()
        return whole(operator, **options)

    parent = os.getpid()
    monkeypatch.setattr("opsmith.checking.check", interrupted)
    done = opsmith("check", str(write()), "-j", "2", "--json", *FAST)
    read = json.loads(done.stdout)
    assert (done.exit_code, read["interrupted"]) == (130, True)
    assert f"{space}::wrong" in [each["operator"] for each in read["unchecked"]]
    assert len(read["reports"]) + len(read["unchecked"]) == 2


@IN_A_FINALISER
def test_ctrl_c_is_not_lost_where_python_ignores_exceptions(
    opsmith: Run, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opsmith import checking
    from opsmith.checking.processes import workers

    class Finalised:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def interrupted(*arguments: Any) -> Any:
        worker = started(*arguments)
        Finalised()
        return worker

    started = workers._started
    monkeypatch.setattr(workers, "_started", interrupted)
    monkeypatch.setattr(checking, "check", lambda *_, **__: signal.pause())
    done = opsmith("check", str(write()), "-j", "2", "--json", *FAST)
    read = json.loads(done.stdout)
    assert (done.exit_code, read["interrupted"], len(read["unchecked"])) == (130, True, 2)


def test_evidence_that_cannot_be_sent_is_sent_as_text(
    opsmith: Run, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from opsmith import checking

    whole = checking.check

    def odd(operator: Any, **options: Any) -> Any:
        report = whole(operator, **options)
        outcomes = tuple(
            replace(
                each,
                failures=tuple(
                    replace(one, evidence={**one.evidence, "odd": lambda: None}) for one in each.failures
                ),
            )
            for each in report.outcomes
        )
        return replace(report, outcomes=outcomes)

    monkeypatch.setattr("opsmith.checking.check", odd)
    done = opsmith("check", str(write()), "-j", "2", "--json", *FAST)
    assert done.exit_code == 1
    assert "<function" in done.stdout


def test_a_bug_of_ours_ends_the_command(opsmith: Run, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    class OddError(Exception):
        """Of a class that no other process can import."""

    def broken(operator: Any, **options: Any) -> Any:
        raise OddError("a slip")

    monkeypatch.setattr("opsmith.checking.check", broken)
    done = opsmith("check", str(write()), "-j", "2", *FAST)
    assert isinstance(done.exception, RuntimeError)
    assert str(done.exception) == "OddError: a slip"


def test_a_number_that_is_none_is_refused(opsmith: Run, write: Write) -> None:
    done = opsmith("check", str(write()), "-j", "0")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "`-j` takes the number of processes" in done.stderr


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("opsmith.checking.processes.child.os.fork", "where processes cannot be forked"),
        ("opsmith.checking.processes.workers.torch.cuda.is_initialized", "CUDA has been used"),
    ],
    ids=["no-fork", "cuda"],
)
def test_where_no_process_can_be_forked_it_says_so(
    opsmith: Run, write: Write, monkeypatch: pytest.MonkeyPatch, where: str, says: str
) -> None:
    if where.endswith("fork"):
        monkeypatch.delattr(where)
    else:
        monkeypatch.setattr(where, lambda: True)
    done = opsmith("check", str(write()), "-j", "2", *FAST)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "operators cannot be checked in several processes here" in done.stderr
    assert says in done.stderr
    assert sys.platform in done.stderr or "GPU" in done.stderr


def test_a_system_that_forks_no_more_says_so(
    opsmith: Run, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fork() -> int:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("opsmith.checking.processes.child.os.fork", fork)
    done = opsmith("check", str(write()), "-j", "2", *FAST)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "the system cannot fork a process: Resource temporarily unavailable" in done.stderr
