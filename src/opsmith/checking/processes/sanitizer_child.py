"""The process under sanitizers: it runs a kernel on every call of a job, and says what became of each.

It knows nothing of the operator but its signature: in the place of the reference stands a function that is
never run, and in the place of the fake kernel the forms that the results have. Its calls run in a fork of it,
so that one that dies costs no other; whoever started it reads, line by line, what happens.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import mmap
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

import opsmith
from opsmith.build.cpp.dispatching import fill_new_memory
from opsmith.build.cpp.sanitizing import Fill, sanitized
from opsmith.build.cpp.tracing import trace_exit, tracer
from opsmith.build.form import Form
from opsmith.checking.processes.redzones import Span, fenced
from opsmith.checking.processes.sanitizer_parent import Job, Trial, Values
from opsmith.checking.samples.sample import replica
from opsmith.core.calls import tensors_in
from opsmith.kernels.cpp import CppKernel

DEATHS = 5
"""After so many calls have died, no more are run."""
FILLS: tuple[Fill, Fill] = ("pattern", "zero")


class NotTakenError(Exception):
    """The kernel does not take the call, which the reference would be given."""


class Child:
    """The process.

    Args:
        folder: Holds the job, and what the sanitizers write.
        tell: Takes what happens, as data.
    """

    def __init__(self, folder: Path, tell: Callable[[dict[str, Any]], None]) -> None:
        self.folder = folder
        self.tell = tell
        self.job: Job = pickle.loads((folder / "job").read_bytes())
        self.sanitizer = ctypes.CDLL(None)
        self.forms: tuple[Form, ...] = ()
        self.at = mmap.mmap(-1, 8)

    def work(self) -> None:
        """Build the kernel, and run all calls."""
        stand_ins = {}
        for fill in FILLS:
            with sanitized(fill):
                stand_ins[fill] = self._declared(fill)
        self.stand_ins = stand_ins
        self.tracer = tracer()
        self.tell({"built": True})
        start = deaths = 0
        while start < len(self.job.trials) and deaths < DEATHS:
            status = self._forked(start)
            reached = int.from_bytes(self.at[:8], "little")
            if reached == len(self.job.trials):
                return
            self.tell({"died": reached, "status": status})
            start, deaths = reached + 1, deaths + 1

    def _declared(self, fill: Fill) -> Any:
        """An operator of this signature that has nothing but the kernel, which is built now."""
        job = self.job
        scope: dict[str, Any] = {"Tensor": Tensor, "NotTakenError": NotTakenError}
        taken = ", ".join(f"{name}: {hint}" for name, hint in job.arguments)
        given = "Tensor" if len(job.results) == 1 else f"tuple[{', '.join(['Tensor'] * len(job.results))}]"
        exec(f"def stand_in({taken}) -> {given}:\n    raise NotTakenError", scope)
        name = job.operator if fill == FILLS[0] else f"{job.operator}_{fill}"
        operator = opsmith.operator(name, opaque=True)(scope["stand_in"])
        operator.fake(self._fake)
        operator.kernel("cpu", cpp=job.text, entry=job.entry, dtypes=job.dtypes, strict=True)
        built = operator.specification.kernels[0].function
        assert isinstance(built, CppKernel)
        built.source = dataclasses.replace(built.source, folder=job.folder)
        if job.trials:
            values = self._values(job.samples[job.trials[0].sample], job.trials[0])[0]
            operator.specification.kernels[0].consider(values)
        return operator

    def _fake(self, *args: Any, **kwargs: Any) -> Any:
        device = next((each.device for each in tensors_in([*args, *kwargs.values()])), torch.device("meta"))
        made = [torch.empty_strided(f.shape, f.stride, dtype=f.dtype, device=device) for f in self.forms]
        return made[0] if len(made) == 1 else tuple(made)

    def _forked(self, start: int) -> int:
        """Run the calls from one on in a fork, and return how that ended."""
        child = os.fork()
        if child == 0:
            self._run(start)
        return os.waitpid(child, 0)[1]

    def _run(self, start: int) -> NoReturn:
        try:
            # Each sanitizer writes to the standard error, and only there do both.
            self.log = os.open(self.folder / f"log.{os.getpid()}", os.O_RDWR | os.O_CREAT | os.O_APPEND)
            os.dup2(self.log, 2)
            if self.tracer is not None:
                trace_exit(self.tracer, 2)
            self.tell({"fork": os.getpid()})
            torch.set_num_threads(self.job.threads)
            for at in range(start, len(self.job.trials)):
                self.at[:8] = at.to_bytes(8, "little")
                self._try(at, self.job.trials[at])
            self.at[:8] = len(self.job.trials).to_bytes(8, "little")
        except BaseException as error:
            self.tell({"failed": f"{type(error).__name__}: {error}"})
        os._exit(0)

    def _try(self, at: int, trial: Trial) -> None:
        self.forms = trial.forms
        values, spans = self._values(self.job.samples[trial.sample], trial)
        self.tell({"trial": at, "memory": [dataclasses.astuple(span) for span in spans]})
        raised = None
        found: dict[str, Any] = {}
        try:
            results = self._called("pattern", values, nan=True)
        except NotTakenError:
            raised = "not taken"
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
        else:
            found["memory"] = [
                dataclasses.astuple(Span(name, each.data_ptr(), each.nbytes))
                for name, each in zip(self.job.results, results, strict=True)
            ]
            found["depends"] = self._depending(values, results)
        self.tell({"done": at, "size": os.fstat(self.log).st_size, "raised": raised, **found})

    def _depending(self, values: list[Any], results: list[Tensor]) -> list[Any]:
        """The results that are others where memory that nothing was written to holds something else.

        First it is both the variables and the results' own memory; then the one that it takes is told.
        """
        others = self._called("zero", values, nan=False)
        places = [at for at, pair in enumerate(zip(results, others, strict=True)) if _differ(*pair)]
        if not places:
            return []
        again = self._called("pattern", values, nan=True)
        crossed = self._called("pattern", values, nan=False)
        told = []
        for at in places:
            if _differ(results[at], again[at]):
                continue  # it gives something else each time, which is not for this to say
            unwritten = _differ(results[at], crossed[at])
            differing = _bits(results[at]) != _bits(crossed[at] if unwritten else others[at])
            rows = differing.view(results[at].numel(), -1).any(1)
            told.append(
                {
                    "result": self.job.results[at],
                    "unwritten": unwritten,
                    "count": int(rows.sum()),
                    "of": rows.numel(),
                    "first": _index(int(rows.nonzero()[0]), results[at].shape),
                }
            )
        return told

    def _called(self, build: Fill, values: list[Any], *, nan: bool) -> list[Tensor]:
        """The results of one of the two builds.

        Args:
            build: Which.
            values: The arguments.
            nan: Whether new memory holds nan, and not what the allocator has put there.
        """
        fill_new_memory(nan)
        with torch.no_grad():
            returned = self.stand_ins[build](*values)
        return list(returned) if isinstance(returned, tuple) else [returned]

    def _values(self, sample: Values, trial: Trial) -> tuple[list[Any], list[Span]]:
        """The arguments, each tensor between fences."""
        flat = [replica(value, trial.dtype) for value in sample.flat]
        for place, layout in trial.layouts:
            flat[place] = layout.of(flat[place].contiguous())
        spans: list[Span] = []
        for place, value in enumerate(flat):
            if isinstance(value, Tensor):
                flat[place], span = fenced(sample.labels[place], value, self.sanitizer)
                spans += [] if span is None else [span]
        values = [
            [flat[at] for at in place] if isinstance(place, list | tuple) else flat[place]
            for place in sample.packing
        ]
        return values, spans


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _differ(one: Tensor, other: Tensor) -> bool:
    return not torch.equal(_bits(one), _bits(other))


def _index(at: int, shape: torch.Size) -> list[int]:
    found: list[int] = []
    for size in reversed(shape):
        at, place = divmod(at, size)
        found.insert(0, place)
    return found


def main(folder: str, writing: int) -> None:
    """Work in a folder, and write what happens to a pipe."""
    os.environ.pop("LD_PRELOAD", None)  # the compiler does without
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    def tell(event: dict[str, Any]) -> None:
        os.write(writing, json.dumps(event).encode() + b"\n")

    try:
        Child(Path(folder), tell).work()
    except opsmith.errors.OpsmithError as error:
        tell({"error": pickle.dumps(error).hex()})
