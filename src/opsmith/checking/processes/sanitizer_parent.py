"""What a process under sanitizers is given to do: a kernel, and the calls to run it on."""

from __future__ import annotations

import json
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from opsmith import errors
from opsmith.build.cpp.sanitizer_reports import SanitizerReport, reports
from opsmith.build.cpp.sanitizing import preloaded
from opsmith.build.cpp.tracing import lines_in
from opsmith.build.form import Form
from opsmith.build.includes import includes_of
from opsmith.build.symbols import Line
from opsmith.build.toolchain import find_toolchain
from opsmith.checking.exceptions import UncheckableError
from opsmith.checking.processes.redzones import Span
from opsmith.checking.samples.layouts import Layout


@dataclass(frozen=True)
class Values:
    """The arguments of a sample.

    Args:
        flat: Their values, lists of tensors spread out.
        labels: How messages call each.
        packing: For each argument the place of its value, or the places of its list's.
    """

    flat: tuple[Any, ...]
    labels: tuple[str, ...]
    packing: tuple[Any, ...]


@dataclass(frozen=True)
class Trial:
    """One call.

    Args:
        sample: Which of the job's samples.
        dtype: dtype of floating tensors; None leaves them as they are.
        layouts: The tensors that lie otherwise than contiguous: the place of each, and how it lies.
        forms: Those of the results.
        told: What it is, in words.
        odd: What lies otherwise, in words; empty for nothing.
    """

    sample: int
    dtype: torch.dtype | None
    layouts: tuple[tuple[int, Layout], ...]
    forms: tuple[Form, ...]
    told: str
    odd: str = ""


@dataclass(frozen=True)
class Job:
    """A kernel, and the calls to run it on.

    Args:
        operator: The operator's name.
        arguments: Name and type hint of each argument.
        results: Names of the results, hidden ones too.
        text: The kernel.
        entry: Name of the function in it.
        folder: Where its own headers are; None where that is not known.
        dtypes: Those that a template is made for; None for the usual ones.
        samples: Arguments.
        trials: The calls.
        threads: How many threads it may use.
    """

    operator: str
    arguments: tuple[tuple[str, str], ...]
    results: tuple[str, ...]
    text: str
    entry: str
    folder: str | None
    dtypes: tuple[torch.dtype, ...] | None
    samples: tuple[Values, ...]
    trials: tuple[Trial, ...]
    threads: int = 2


START_S = 600.0
"""How long the process may take until its kernel is built."""
GRACE_S = 10.0

_OPTIONS: Mapping[str, Mapping[str, int]] = {
    "ASAN_OPTIONS": {
        "abort_on_error": 0,
        "detect_leaks": 0,  # Python keeps what it has
        "detect_odr_violation": 0,  # the same kernel is built twice
        "detect_stack_use_after_return": 1,
        "halt_on_error": 0,
        "handle_abort": 2,
        "malloc_context_size": 1,
        "max_malloc_fill_size": 1 << 30,
        "redzone": 64,
        "symbolize": 0,  # it would read the lines of Python and torch as well
    },
    "UBSAN_OPTIONS": {"halt_on_error": 0, "print_stacktrace": 1, "symbolize": 0},
}


def options(job: Job) -> dict[str, str]:
    """What the sanitizers are told, in the environment of a job's process.

    Sanitizers move variables to memory of their own, to see what is used after its function returned. g++
    before 13.3 does not align vectors there, and kernels that have some crash (GCC bug 110027).
    """
    own = (job.text, *includes_of(job.text, job.folder).values())
    found = {variable: dict(values) for variable, values in _OPTIONS.items()}
    if any(_VECTORS.search(text) for text in own):
        found["ASAN_OPTIONS"]["detect_stack_use_after_return"] = 0
    return {
        variable: ":".join(f"{name}={value}" for name, value in values.items())
        for variable, values in found.items()
    }


_VECTORS = re.compile(r"\bvector_size\b|\b__m\d{3}[di]?\b|\b_mm\d*_")


@dataclass
class Run:
    """What became of one call.

    Attributes:
        trial: Which.
        spans: Where its arguments lay, and its results.
        raised: What it raised; None for nothing.
        depends: Results that depend on what was in memory before.
        reports: What the sanitizers told of.
        status: That of the process, where the call ended it.
        late: Whether it took too long.
        lines: Where it left the process, the innermost first.
    """

    trial: int
    spans: list[Span] = field(default_factory=list)
    raised: str | None = None
    depends: list[Mapping[str, Any]] = field(default_factory=list)
    reports: list[SanitizerReport] = field(default_factory=list)
    status: int | None = None
    late: bool = False
    lines: list[Line] = field(default_factory=list)


@dataclass(frozen=True)
class Done:
    """What became of a job.

    Args:
        runs: Its calls.
        left: How many were not run.
    """

    runs: list[Run]
    left: int = 0


def done(job: Job, limit_s: float) -> Done:
    """Do a job.

    Args:
        job: What to do.
        limit_s: Seconds that a call may take.

    Raises:
        UncheckableError: If there are no sanitizers, or no process runs with them.
        OpsmithError: What keeps the kernel from being built.
    """
    try:
        libraries = preloaded(find_toolchain())
    except errors.ToolchainError as error:
        raise UncheckableError(error) from error
    with tempfile.TemporaryDirectory(prefix="opsmith-sanitized-") as name:
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps(job))
        reading, writing = os.pipe()
        with (folder / "said").open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM.format(path=sys.path, folder=name, writing=writing)],
                env={**os.environ, "LD_PRELOAD": " ".join(map(str, libraries)), **options(job)},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=[writing],
                start_new_session=True,
            )
        os.close(writing)
        try:
            runs = _Conversation(folder, limit_s).of(reading)
        finally:
            os.close(reading)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and its forks
            process.wait()
    return Done(runs, len(job.trials) - (1 + runs[-1].trial if runs else 0))


PROGRAM = """\
import sys
sys.path[:] = {path!r}
from opsmith.checking.processes.sanitizer_child import main
main({folder!r}, {writing})
"""


class _Conversation:
    """What the process tells, read until it has no more to tell."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self.folder, self.limit_s = folder, limit_s
        self.runs: list[Run] = []
        self.built = False
        self.forks: list[int] = []
        self.read = 0

    def of(self, reading: int) -> list[Run]:
        late = False
        for event in self._events(reading):
            if event is None:
                if late or not self.built or not self.forks or not self.runs:
                    break  # it does not even die
                late = self.runs[-1].late = True
                with suppress(ProcessLookupError):  # it has ended just now
                    os.kill(self.forks[-1], signal.SIGABRT)  # the sanitizer says where it is
                self.limit_s = GRACE_S
                continue
            self._take(event)
            if late and "died" in event:
                break
        if not self.built:
            raise UncheckableError(self._never_ran())
        return self.runs

    def _events(self, reading: int) -> Iterator[dict[str, Any] | None]:
        """Each line; None where the time for it is over."""
        rest = b""
        end = time.monotonic() + START_S
        while True:
            left = end - time.monotonic()
            if left <= 0 or not select.select([reading], [], [], left)[0]:
                yield None
                end = time.monotonic() + self.limit_s
                continue
            part = os.read(reading, 65536)
            if not part:
                return
            *lines, rest = (rest + part).split(b"\n")
            yield from map(json.loads, lines)
            end = time.monotonic() + (self.limit_s if self.built else START_S)

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            raise pickle.loads(bytes.fromhex(event["error"]))
        if "failed" in event:
            raise RuntimeError(f"a sanitised check failed by a mistake of its own: {event['failed']}")
        if "built" in event:
            self.built = True
        elif "fork" in event:
            self.forks.append(event["fork"])
            self.read = 0
        elif "trial" in event:
            self.runs.append(Run(event["trial"], [Span(*span) for span in event["memory"]]))
        elif "done" in event:
            run = self.runs[-1]
            run.raised, run.depends = event["raised"], event.get("depends", [])
            run.spans += [Span(*span) for span in event.get("memory", [])]
            run.reports += reports(self._written(event["size"]))
        elif "died" in event:
            if not self.runs or self.runs[-1].trial != event["died"]:
                self.runs.append(Run(event["died"]))
            self.runs[-1].status = event["status"]
            words = self._written(None)
            self.runs[-1].reports += reports(words)
            self.runs[-1].lines = lines_in(words)

    def _written(self, size: int | None) -> str:
        """What the sanitizers have written since the last call, up to so many bytes; to the end for None."""
        if not self.forks:
            return ""
        with (self.folder / f"log.{self.forks[-1]}").open("rb") as log:
            log.seek(self.read)
            written = log.read(None if size is None else size - self.read)
        self.read += len(written)
        return written.decode(errors="replace")

    def _never_ran(self) -> errors.ToolchainError:
        words = (self.folder / "said").read_text(errors="replace").strip()
        return errors.ToolchainError(
            "no process runs with AddressSanitizer",
            expected="Python and torch with the sanitizer's library loaded before all others",
            got="\n".join(words.splitlines()[-5:]) or "it ended without a word",
            hint="check without `sanitize`, or with another g++, named in CXX",
        )
