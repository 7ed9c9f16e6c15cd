"""Worker processes that check several operators at once; each process checks one after another.

They are forked, so that they have the parent's imported modules. If a worker dies, only its current report is
lost.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import NoReturn

import torch

from opsmith import errors
from opsmith.checking.processes.child import (
    Child,
    backward_refusal,
    describe_exit,
    packed,
    refuse_fork,
)
from opsmith.checking.processes.watchdog import POLL_S
from opsmith.checking.report import Report

Advance = Callable[[str, int, int], None]
Task = Callable[[Advance], Report]
"""Function that makes a report, and passes its progress to a given function, as for `check`."""


@dataclass(frozen=True)
class Progressed:
    """Progress of a task.

    Args:
        task: Position of the task.
        activity: Its current activity.
        done: Number of finished activities.
        total: Number of activities.
    """

    task: int
    activity: str
    done: int
    total: int


@dataclass(frozen=True)
class Answered:
    """End of a task.

    Args:
        task: Position of the task.
        report: Its report; None if there is an error.
        error: The exception that it raised, or the end of its process.
    """

    task: int
    report: Report | None = None
    error: BaseException | None = None


@dataclass
class _Worker:
    """A process, and the task that it runs; None while it waits for a task."""

    child: Child
    task: int | None = None


def run_in_workers(tasks: Sequence[Task], count: int) -> Generator[Progressed | Answered | None]:
    """Run tasks in several processes, and yield their progress and answers as they arrive.

    It yields None after each quarter of a second without news.

    Args:
        tasks: The tasks, in the order in which they begin.
        count: Number of processes.

    Raises:
        UsageError: As for `refuse_fork`.
    """
    hint = "leave `-j` out, or use no GPU while the file is imported"
    refuse_fork("operators cannot be checked in several processes here", "-j", hint)
    left, workers = deque(range(len(tasks))), []
    try:
        for _ in range(min(count, len(tasks))):
            workers.append(_started(tasks, left.popleft()))
        while workers:
            ready = wait([each.child.connection for each in workers], POLL_S)
            if not ready:
                yield None
            for worker in [*workers]:
                events, alive = _received(worker, heard=worker.child.connection in ready)
                yield from events
                if worker.task is not None and alive:
                    continue
                if alive and left:
                    _begin(worker, left.popleft())
                    continue
                workers.remove(worker)
                worker.child.end()
                if left and not alive:
                    workers.append(_started(tasks, left.popleft()))
    finally:
        for worker in workers:
            worker.child.end()


def _received(worker: _Worker, *, heard: bool) -> tuple[list[Progressed | Answered], bool]:
    """Read a worker's messages; the second value is False if the worker has ended."""
    events: list[Progressed | Answered] = []
    child = worker.child
    try:
        while heard and worker.task is not None and child.connection.poll():
            event = pickle.loads(child.connection.recv_bytes())
            if isinstance(event, Progressed):
                events.append(event)
            else:
                events.append(Answered(worker.task, *event))
                worker.task = None
        if heard or not child.has_ended():
            return events, True
    except (EOFError, ConnectionError):
        child.end()
    if worker.task is None:
        return events, False
    error = errors.KernelError(
        f"the process that checked the operator is gone: {describe_exit(child.status)[0]}",
        hint="run `opsmith check --isolate`, which reports the end of the process as a finding, with the "
        "line that ran",
    )
    return [*events, Answered(worker.task, error=error)], False


def _started(tasks: Sequence[Task], first: int) -> _Worker:
    """Fork a worker, and let it begin with a task."""
    worker = _Worker(Child.fork(partial(_work, tasks), "-j"))
    _begin(worker, first)
    return worker


def _begin(worker: _Worker, task: int) -> None:
    worker.task = task
    with suppress(OSError):  # it has ended, which is noticed at the next read
        worker.child.connection.send(task)


def _work(tasks: Sequence[Task], connection: Connection) -> NoReturn:
    """Run tasks until none is left; end without running the parent's handlers or flushing buffers."""
    try:
        os.setsid()  # Ctrl-C is for the parent, which ends the workers
        if faulthandler.is_enabled():
            faulthandler.enable(2)
        torch.set_num_threads(1)
        refusal = backward_refusal("-j", "leave `-j` out")
        while True:
            at: int = connection.recv()

            def advance(activity: str, done: int, total: int, at: int = at) -> None:
                connection.send_bytes(pickle.dumps(Progressed(at, activity, done, total)))

            try:
                if refusal is not None:
                    raise refusal
                answer = packed(tasks[at](advance))
            except BaseException as error:
                answer = packed(error=error)
            connection.send_bytes(answer)
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
