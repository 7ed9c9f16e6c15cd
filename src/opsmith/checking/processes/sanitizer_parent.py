"""Parent of a process under sanitizers: send it a kernel with calls, and read the outcomes."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import torch

from opsmith import errors
from opsmith.build.source_text import includes_of
from opsmith.build.symbols import Line
from opsmith.build.toolchain import find_toolchain, processors
from opsmith.checking.exceptions import UncheckableError
from opsmith.checking.samples.memory_layouts import Layout
from opsmith.kernels.cpp.crash_trace import lines_in
from opsmith.kernels.cpp.sanitizer import SanitizerReport, preloaded, reports
from opsmith.kernels.cpp.source import CppSource
from opsmith.torch_library.result_layouts import ResultLayout

REDZONE = 1024
"""Poisoned bytes on either side of each argument."""


@dataclass(frozen=True)
class MemorySpan:
    """Memory of an argument or a result, and the size of its redzones."""

    label: str
    start: int
    size: int
    fence: int = 0


@dataclass(frozen=True)
class SanitizedCall:
    """A call of the kernel.

    Args:
        flat: Its values, with lists of tensors expanded.
        labels: Name of each value in messages.
        packing: For each argument, the position of its value, or the positions of its list's items.
        dtype: dtype of floating tensors; None for each tensor's own.
        laid: Position and layout of a tensor that is not contiguous; None if no layout is changed.
        forms: Shapes, strides and dtypes of the results.
        description: Description of the call.
        odd: Description of the layout; empty for contiguous tensors.
    """

    flat: tuple[Any, ...]
    labels: tuple[str, ...]
    packing: tuple[Any, ...]
    dtype: torch.dtype | None
    laid: tuple[int, Layout] | None
    forms: tuple[ResultLayout, ...]
    description: str
    odd: str = ""


@dataclass(frozen=True)
class SanitizerJob:
    """A kernel, and the calls to run it on.

    Args:
        operator: Name of the operator.
        arguments: Name and annotation of each argument.
        results: Names of the results, including hidden results.
        source: Source of the kernel.
        dtypes: dtypes for which a template is instantiated; None for the usual dtypes.
        calls: Calls.
        written: Names of the arguments that it writes into.
    """

    operator: str
    arguments: tuple[tuple[str, str], ...]
    results: tuple[str, ...]
    source: CppSource
    dtypes: tuple[torch.dtype, ...] | None
    calls: tuple[SanitizedCall, ...]
    written: tuple[str, ...] = ()


START_S = 600.0
"""Time limit in seconds until the kernel is built."""
GRACE_S = 10.0
"""Time limit in seconds for a late call to write its report."""

_OPTIONS: Mapping[str, Mapping[str, int]] = {
    "ASAN_OPTIONS": {
        "abort_on_error": 0,
        "detect_leaks": 0,  # Python does not free all its memory
        "detect_odr_violation": 0,  # the same kernel is built twice
        "detect_stack_use_after_return": 1,
        "halt_on_error": 0,
        "handle_abort": 2,
        "malloc_context_size": 1,
        "max_malloc_fill_size": 1 << 30,
        "redzone": 64,
        "symbolize": 0,  # it would also read the symbols of Python and torch
    },
    "UBSAN_OPTIONS": {"halt_on_error": 0, "print_stacktrace": 1, "symbolize": 0},
}


def options(job: SanitizerJob) -> dict[str, str]:
    """Return the environment variables with the sanitizers' options for a job.

    Sanitizers move variables to memory of their own, to detect uses after the function returned. g++ before
    13.3 does not align vectors there, and kernels with vectors crash (GCC bug 110027).
    """
    own = (job.source.text, *includes_of(job.source.text, job.source.folder).values())
    found = {variable: dict(values) for variable, values in _OPTIONS.items()}
    if any(_VECTORS.search(text) for text in own):
        found["ASAN_OPTIONS"]["detect_stack_use_after_return"] = 0
    return {
        variable: ":".join(f"{name}={value}" for name, value in values.items())
        for variable, values in found.items()
    }


_VECTORS = re.compile(r"\bvector_size\b|\b__m\d{3}[di]?\b|\b_mm\d*_")


@dataclass
class CallOutcome:
    """Outcome of one call.

    Attributes:
        call: Index of the call.
        spans: Memory of its arguments and results.
        raised: Exception that it raised; None for none.
        depends: Results that depend on uninitialized memory.
        reports: Reports of the sanitizers.
        status: Exit status of the process, if the call ended it.
        late: True if it exceeded the time limit.
        lines: Stack of a crash; the innermost line comes first.
    """

    call: int
    spans: list[MemorySpan] = field(default_factory=list)
    raised: str | None = None
    depends: list[Mapping[str, Any]] = field(default_factory=list)
    reports: list[SanitizerReport] = field(default_factory=list)
    status: int | None = None
    late: bool = False
    lines: list[Line] = field(default_factory=list)


def run_jobs(jobs: Iterable[SanitizerJob], limit_s: float) -> Iterator[list[CallOutcome]]:
    """Run each job in a process under sanitizers, and yield the outcomes of its calls, in order.

    One process runs per core, since a job spends most of its time on its start and the compiler.

    Args:
        jobs: The jobs.
        limit_s: Time limit of a call in seconds.

    Raises:
        UncheckableError: If there are no sanitizers, or no process starts with them.
        OpsmithError: If a kernel cannot be built.
    """
    try:
        libraries = preloaded(find_toolchain())
    except errors.ToolchainError as error:
        raise UncheckableError(error) from error
    with ExitStack() as running:
        processes: deque[_SanitizerProcess] = deque()
        for job in jobs:
            processes.append(running.enter_context(_SanitizerProcess(job, libraries, limit_s)))
            if len(processes) == processors():
                yield processes.popleft().outcomes()
        while processes:
            yield processes.popleft().outcomes()


PROGRAM = """\
import sys
sys.path[:] = {path!r}
from opsmith.checking.processes.sanitizer_child import main
main({folder!r}, {writing})
"""


class _SanitizerProcess:
    """Process that runs a job under sanitizers. As a context manager, it ends with the context."""

    def __init__(self, job: SanitizerJob, libraries: Iterable[Path], limit_s: float) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="opsmith-sanitized-")
        self.folder, self.limit_s = Path(self.directory.name), limit_s
        (self.folder / "job").write_bytes(pickle.dumps(job))
        self.events, theirs = Pipe(duplex=False)
        program = PROGRAM.format(path=sys.path, folder=self.directory.name, writing=theirs.fileno())
        with (self.folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program],
                env={**os.environ, "LD_PRELOAD": " ".join(map(str, libraries)), **options(job)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        theirs.close()
        self.runs: list[CallOutcome] = []
        self.built, self.forks, self.read = False, list[int](), 0

    def __enter__(self) -> _SanitizerProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.events.closed:
            return
        self.events.close()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # and its forks
        self.process.wait()
        self.directory.cleanup()

    def outcomes(self) -> list[CallOutcome]:
        """Read the events until the job ends; end the process."""
        with self:
            late = False
            for event in self._events():
                if event is None:
                    if late or not self.built or not self.forks or not self.runs:
                        break  # it does not respond to the signal
                    late = self.runs[-1].late = True
                    with suppress(ProcessLookupError):  # it has just ended
                        os.kill(self.forks[-1], signal.SIGABRT)  # the sanitizer reports its stack
                    self.limit_s = GRACE_S
                    continue
                self._take(event)
                if late and "died" in event:
                    break
            if not self.built:
                raise UncheckableError(self._never_ran())
            return self.runs

    def _events(self) -> Iterator[dict[str, Any] | None]:
        """Yield each event; None after a time limit."""
        while True:
            if not self.events.poll(self.limit_s if self.built else START_S):
                yield None
                continue
            try:
                event = self.events.recv()
            except EOFError:
                return
            yield event

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            raise event["error"]
        if "failed" in event:
            raise RuntimeError(f"a sanitised check failed because of an error of its own: {event['failed']}")
        if "built" in event:
            self.built = True
        elif "fork" in event:
            self.forks.append(event["fork"])
            self.read = 0
        elif "call" in event:
            self.runs.append(CallOutcome(event["call"], event["memory"]))
        elif "done" in event:
            run = self.runs[-1]
            run.raised, run.depends = event["raised"], event.get("depends", [])
            run.spans += event.get("memory", [])
            run.reports += reports(self._written(event["size"]))
        elif "died" in event:
            if not self.runs or self.runs[-1].call != event["died"]:
                self.runs.append(CallOutcome(event["died"]))
            words = self._written(None)
            self.runs[-1].status, self.runs[-1].lines = event["status"], lines_in(words)
            self.runs[-1].reports += reports(words)

    def _written(self, size: int | None) -> str:
        """Read the sanitizers' new output up to a size, or to the end if the size is None."""
        if not self.forks:
            return ""
        with (self.folder / f"log.{self.forks[-1]}").open("rb") as log:
            log.seek(self.read)
            written = log.read(None if size is None else size - self.read)
        self.read += len(written)
        return written.decode(errors="replace")

    def _never_ran(self) -> errors.ToolchainError:
        words = (self.folder / "output").read_text(errors="replace").strip()
        return errors.ToolchainError(
            "no process runs with AddressSanitizer",
            expected="Python and torch with the sanitizer's library loaded before all others",
            got="\n".join(words.splitlines()[-5:]) or "the process ended and printed nothing",
            hint="check without `sanitize`, or name another g++ in CXX",
        )
