"""Child process under sanitizers: run a kernel on every call of a job, and report the outcomes.

It knows only the signature of the operator: its reference never runs, and its fake kernel returns tensors of
the known result layouts. The calls run in a fork, so that a crash does not affect the other calls.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

import opsmith
from opsmith.checking.processes.sanitizer_parent import REDZONE, MemorySpan, SanitizedCall, SanitizerJob
from opsmith.core.call_arguments import tensors_in
from opsmith.core.forked_child import end_with_parent
from opsmith.judging.compare import as_bytes, same_bits, unravel
from opsmith.judging.tensors import replica
from opsmith.kernels.cpp.crash_trace import trace_exit, tracer
from opsmith.kernels.cpp.kernel import CppKernel
from opsmith.kernels.cpp.sanitizer import Fill, sanitized
from opsmith.kernels.runtime.library import fill_new_memory
from opsmith.torch_library.result_layouts import ResultLayout

DEATHS = 5
"""Number of crashes after which no more calls are run."""
THREADS = 2
"""Number of threads of torch."""
FILLS: tuple[Fill, Fill] = ("pattern", "zero")


class SanitizerChild:
    """The child process.

    Args:
        folder: Folder of the job, and of the sanitizers' output.
        send: Function that sends an event to the parent.
    """

    def __init__(self, folder: Path, send: Callable[[dict[str, Any]], None]) -> None:
        self.folder = folder
        self.send = send
        self.job: SanitizerJob = pickle.loads((folder / "job").read_bytes())
        self.sanitizer = ctypes.CDLL(None)
        self.forms: tuple[ResultLayout, ...] = ()
        self.before: list[tuple[str, Tensor, Tensor]] = []
        self.reached = mmap.mmap(-1, 8)  # shared with the forks

    def work(self) -> None:
        """Build the kernel, and run all calls."""
        self.stand_ins = {}
        for fill in FILLS:
            with sanitized(fill):
                self.stand_ins[fill] = self._declared(fill)
        self.tracer = tracer()
        self.send({"built": True})
        start = deaths = 0
        while start < len(self.job.calls) and deaths < DEATHS:
            status = self._forked(start)
            reached = int.from_bytes(self.reached[:8], "little")
            if reached == len(self.job.calls):
                return
            self.send({"died": reached, "status": status})
            start, deaths = reached + 1, deaths + 1

    def _declared(self, fill: Fill) -> Any:
        """Declare an operator of this signature with only the kernel, and build it."""
        job = self.job
        scope: dict[str, Any] = {"Tensor": Tensor}
        taken = ", ".join(f"{name}: {hint}" for name, hint in job.arguments)
        given = "Tensor" if len(job.results) == 1 else f"tuple[{', '.join(['Tensor'] * len(job.results))}]"
        given = given if job.results else "None"
        # A call that the kernel rejects would run the reference.
        exec(f"def stand_in({taken}) -> {given}:\n    raise RuntimeError('not taken')", scope)
        name = job.operator if fill == FILLS[0] else f"{job.operator}_{fill}"
        operator = opsmith.operator(name, opaque=True, mutates=job.written)(scope["stand_in"])
        operator.fake(self._fake)
        # The parent has selected the calls that the kernel takes.
        copies: dict[str, Any] = {"copies": "allowed"} if job.written else {}
        source = job.source
        operator.kernel("cpu", cpp=source.text, entry=source.entry, dtypes=job.dtypes, strict=True, **copies)
        (kernel,) = operator.specification.kernels
        assert isinstance(kernel.function, CppKernel)
        kernel.function.source = source
        kernel.consider(self._values(job.calls[0])[0])
        return operator

    def _fake(self, *args: Any, **kwargs: Any) -> Any:
        device = next((each.device for each in tensors_in([*args, *kwargs.values()])), torch.device("meta"))
        made = [torch.empty_strided(f.shape, f.stride, dtype=f.dtype, device=device) for f in self.forms]
        return made[0] if len(made) == 1 else tuple(made)

    def _forked(self, start: int) -> int:
        """Run the calls, beginning with a given call, in a fork; return its exit status."""
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            end_with_parent(parent)
            self._run(start)
        return os.waitpid(child, 0)[1]

    def _run(self, start: int) -> NoReturn:
        try:
            # Both sanitizers write only to standard error.
            self.log = os.open(self.folder / f"log.{os.getpid()}", os.O_RDWR | os.O_CREAT | os.O_APPEND)
            os.dup2(self.log, 2)
            if self.tracer is not None:
                trace_exit(self.tracer, 2)
            self.send({"fork": os.getpid()})
            torch.set_num_threads(THREADS)
            for at in range(start, len(self.job.calls)):
                self.reached[:8] = at.to_bytes(8, "little")
                self._try(at, self.job.calls[at])
            self.reached[:8] = len(self.job.calls).to_bytes(8, "little")
        except BaseException as error:
            self.send({"failed": f"{type(error).__name__}: {error}"})
        os._exit(0)

    def _try(self, at: int, call: SanitizedCall) -> None:
        self.forms = call.forms
        values, spans = self._values(call)
        self.before = [(label, tensor, tensor.clone()) for label, tensor in self._written(values)]
        self.send({"call": at, "memory": spans})
        raised = None
        found: dict[str, Any] = {}
        try:
            results = self._called("pattern", values, nan=True)
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
        else:
            found["memory"] = [
                MemorySpan(name, each.data_ptr(), each.nbytes)
                for name, each in zip(self.job.results, results, strict=False)
            ]
            found["depends"] = self._depending(values, results)
        self.send({"done": at, "size": os.fstat(self.log).st_size, "raised": raised, **found})

    def _depending(self, values: list[Any], results: list[Tensor]) -> list[Any]:
        """Find results that depend on uninitialized memory.

        Two builds and two fillings of new memory differ in variables and in the results' memory; a third run
        decides which of these a result depends on.
        """
        others = self._called("zero", values, nan=False)
        suspects = [at for at, pair in enumerate(zip(results, others, strict=True)) if not same_bits(*pair)]
        if not suspects:
            return []
        again = self._called("pattern", values, nan=True)
        crossed = self._called("pattern", values, nan=False)
        found = []
        for at in suspects:
            if not same_bits(results[at], again[at]):
                continue  # not deterministic, which a different property reports
            unwritten = not same_bits(results[at], crossed[at])
            differing = as_bytes(results[at]) != as_bytes(crossed[at] if unwritten else others[at])
            rows = differing.view(results[at].numel(), -1).any(1)
            found.append(
                {
                    "result": [*self.job.results, *(label for label, _, _ in self.before)][at],
                    "unwritten": unwritten,
                    "count": int(rows.sum()),
                    "of": rows.numel(),
                    "first": [*unravel(int(rows.nonzero()[0]), results[at].shape)],
                }
            )
        return found

    def _called(self, build: Fill, values: list[Any], *, nan: bool) -> list[Tensor]:
        """Run one of the two builds; return copies of its results, and of the arguments that it has written.

        Args:
            build: Name of the build.
            values: The arguments.
            nan: True to fill new memory with nan instead of the allocator's leftovers.
        """
        fill_new_memory(nan)
        with torch.no_grad():
            for _, tensor, before in self.before:
                tensor.copy_(before)
            returned = self.stand_ins[build](*values)
        results = list(returned) if isinstance(returned, tuple) else [returned][: len(self.job.results)]
        return [*results, *(tensor.clone() for _, tensor, _ in self.before)]

    def _written(self, values: list[Any]) -> Iterator[tuple[str, Tensor]]:
        names = [name for name, _ in self.job.arguments]
        for name, value in zip(names, values, strict=True):
            for position, tensor in enumerate(tensors_in([value] if name in self.job.written else [])):
                yield f"{name}[{position}]" if isinstance(value, list) else name, tensor

    def _values(self, call: SanitizedCall) -> tuple[list[Any], list[MemorySpan]]:
        """Make the arguments, with each tensor between redzones."""
        flat = [replica(value, call.dtype) for value in call.flat]
        if call.laid is not None:
            argnum, layout = call.laid
            flat[argnum] = layout.of(flat[argnum].contiguous())
        spans: list[MemorySpan] = []
        for argnum, value in enumerate(flat):
            if isinstance(value, Tensor):
                flat[argnum], span = with_redzones(call.labels[argnum], value, self.sanitizer)
                spans += [] if span is None else [span]
        values = [
            [flat[at] for at in each] if isinstance(each, list) else flat[each] for each in call.packing
        ]
        return values, spans


ALIGNED = 64
"""Alignment in bytes of the memory that torch allocates."""


def with_redzones(label: str, value: Tensor, sanitizer: Any) -> tuple[Tensor, MemorySpan | None]:
    """Copy a tensor between poisoned redzones; return the copy and its memory.

    The copy has only the memory that its elements span, even for a slice, and the alignment of the original,
    so that a kernel that assumes aligned memory fails with it. An empty tensor has a null pointer and no
    redzones.

    Args:
        label: Name of the argument.
        value: Tensor of any strides.
        sanitizer: Library of AddressSanitizer.
    """
    if not value.numel():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype), None
    size = value.element_size()
    extent: int = 1 + sum((n - 1) * int(step) for n, step in zip(value.shape, value.stride(), strict=True))
    lead = REDZONE // size + int(value.storage_offset()) % (ALIGNED // size)
    block = torch.empty(lead + extent + REDZONE // size, dtype=value.dtype)
    block.as_strided((extent,), (1,), lead).copy_(value.as_strided((extent,), (1,), value.storage_offset()))
    begin = block.data_ptr()
    start, end, stop = begin + lead * size, begin + (lead + extent) * size, begin + block.numel() * size
    for first, last in ((begin, start), (end, stop)):
        sanitizer.__asan_poison_memory_region(ctypes.c_void_p(first), ctypes.c_size_t(last - first))
    copy = block.as_strided(value.shape, value.stride(), lead)
    return copy, MemorySpan(label, start, extent * size, REDZONE)


def main(folder: str, writing: int) -> None:
    """Work in a folder, and write events to a pipe."""
    os.environ.pop("LD_PRELOAD", None)  # the compiler must not load it
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    send = Connection(writing, readable=False).send
    try:
        SanitizerChild(Path(folder), send).work()
    except opsmith.errors.OpsmithError as error:
        send({"error": error})
