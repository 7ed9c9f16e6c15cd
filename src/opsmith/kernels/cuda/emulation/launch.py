"""Launches of emulated kernels: memory between inaccessible pages, and processes that run launches."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.forked_child import end_with_parent
from opsmith.core.forked_locks import lock_of
from opsmith.kernels.cuda.emulation.compiler import EmulatedLibrary
from opsmith.kernels.cuda.launch import Geometry
from opsmith.kernels.cuda.parameters import PackedParameters
from opsmith.torch_library.result_layouts import extent_of

MAX_REPORTS = 48
"""Maximum number of reports of one launch, each for different lines."""
MAX_REQUESTS = 8192
"""Maximum number of kinds of requests that are counted separately in one launch."""
THREAD_STEPS, BLOCK_STEPS = 10_000_000, 40_000_000
"""Maximum steps of a thread and of a block. Steps are accesses, and pieces of code without a branch."""
STEPS = 400_000_000
"""Maximum steps of all blocks of a launch."""
ALIGNED = 64
"""Alignment in bytes of the memory that torch allocates on the CPU."""
ORDERS = ("forward", "backward", "alternating", "random")
"""Orders in which the threads of a block run, in the order of the runtime's numbers."""


_libraries_lock = lock_of(sys.modules[__name__], "_libraries_lock")
"""Lock of the libraries' state: each library runs one launch at a time, and a child process copies it."""


class Kind(IntEnum):
    """Kinds of reports, as in launch_record.h."""

    OUT_OF_BOUNDS = 1
    BETWEEN_ELEMENTS = 2
    INPUT_WRITTEN = 3
    NO_MEMORY = 4
    OTHER_STACK = 5
    SHARED_OUT_OF_BOUNDS = 6
    ARRAY_INDEX = 7
    UNINITIALIZED_SHARED = 8
    UNINITIALIZED_RESULT = 9
    RACE = 10
    MISALIGNED = 11
    DIVERGENT_BARRIER = 12
    BARRIER_AFTER_EXIT = 13
    DEADLOCK = 14
    ABSENT_LANE = 15
    NOT_IN_MASK = 16
    NOT_WRITTEN = 17
    UNDEFINED = 18
    TRAP = 19
    ENDLESS = 20
    TOO_LONG = 21
    WAITS_FOR_BLOCK = 22
    CRASH = 23
    STACK_OVERFLOW = 24
    UNORDERED_SUM = 25
    BEYOND_SHARED_VARIABLE = 26
    OUT_OF_MEMORY = 27


IN_SHARED, NOWHERE, IN_GLOBAL_VARIABLE = -1, -2, -3
"""Values of `Report.region` that are not indices of tensors."""


class Index(ctypes.Structure):
    """Index of a thread or block, in three dimensions."""

    _fields_ = [("x", ctypes.c_uint32), ("y", ctypes.c_uint32), ("z", ctypes.c_uint32)]

    def __str__(self) -> str:
        """Return the index in the form of messages."""
        return f"({self.x}, {self.y}, {self.z})"


class Report(ctypes.Structure):
    """Report of the runtime; see launch_record.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("kind", "write", "size", "region")),
        ("offset", ctypes.c_int64),
        *((name, ctypes.c_uint64) for name in ("pc", "other_pc")),
        *((name, Index) for name in ("block", "thread", "other_block", "other_thread")),
        *((name, ctypes.c_int32) for name in ("other_write", "other_line", "line", "count")),
        *((name, ctypes.c_char_p) for name in ("file", "text")),
    ]


class Requests(ctypes.Structure):
    """Requests of warps from one place in the code to one tensor or to shared memory; see launch_record.h."""

    _fields_ = [
        ("pc", ctypes.c_uint64),
        *((name, ctypes.c_int32) for name in ("region", "use", "size", "unused")),
        *((name, ctypes.c_uint64) for name in ("count", "lanes", "parts", "fewest")),
    ]


class _Region(ctypes.Structure):
    _fields_ = [
        ("base", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("mask", ctypes.c_void_p),
        ("written", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("item", "writable", "initialized", "complete")),
    ]


class _Options(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("order", "most")),
        *((name, ctypes.c_uint64) for name in ("seed", "thread_steps", "block_steps", "steps")),
        *((name, ctypes.c_int32) for name in ("handle_faults", "most_requests", "first", "unused")),
        ("requests", ctypes.c_void_p),
    ]


class _Outcome(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("finished", "reports", "requests", "unused")),
        ("steps", ctypes.c_uint64),
    ]


_RECORDED: list[tuple[str, Any]] = [("outcome", _Outcome), ("reports", Report * MAX_REPORTS)]


class _LaunchRecord(ctypes.Structure):
    """Memory into which the runtime writes about a launch."""

    _fields_ = [*_RECORDED, ("requests", Requests * 0)]


class _CountedRecord(ctypes.Structure):
    """Memory for a launch whose requests are counted."""

    _fields_ = [*_RECORDED, ("requests", Requests * MAX_REQUESTS)]


@dataclass(frozen=True, slots=True)
class Order:
    """Order in which the threads of a block run.

    Attributes:
        name: One of `ORDERS`.
        seed: Seed of a random order.
    """

    name: str
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TensorUse:
    """Use of a tensor by the launches of a call.

    Attributes:
        label: Name of the argument, result or scratch buffer.
        writable: True if a kernel may write it.
        initialized: True if it has values before the launches.
        complete: True if each of its elements must be written or initialized.
    """

    label: str
    writable: bool
    initialized: bool
    complete: bool = False


@dataclass(frozen=True, slots=True)
class LaunchTensor:
    """Tensor in guarded memory, into which launches write.

    Attributes:
        use: Permitted use of the tensor.
        tensor: The tensor.
        marks: A byte for each item of its memory, 1 if a launch has written it. None if all items are
            initialized, or there is only one launch.
    """

    use: TensorUse
    tensor: Tensor
    marks: Tensor | None = None

    @classmethod
    def of(cls, tensor: Tensor, use: TensorUse, *, followed: bool) -> LaunchTensor:
        """Copy a tensor; if the launch is `followed` by another one, it marks the items that it writes."""
        marked = followed and use.writable and not use.initialized and tensor.numel()
        marks = guarded(torch.zeros(extent_of(tensor), dtype=torch.uint8)) if marked else None
        return cls(use, guarded(tensor, filled=use.initialized), marks)

    @property
    def label(self) -> str:
        """Name of the argument, result or scratch buffer."""
        return self.use.label


@dataclass(frozen=True, slots=True)
class EmulatedLaunch:
    """Launch of an instance on the CPU.

    Attributes:
        library: Library of the instance.
        entry: Index of the instance in it.
        geometry: Grid, block and dynamic shared memory.
        packed: Parameters.
        passed: Indices of the tensors in the parameters.
        tensors: Tensors of the call.
        order: Order of the threads.
    """

    library: EmulatedLibrary
    entry: int
    geometry: Geometry
    packed: PackedParameters
    passed: tuple[int, ...]
    tensors: tuple[LaunchTensor, ...]
    order: Order


EmulatedRun = tuple[EmulatedLaunch, ...]
"""Launches of a call, one after the other; empty if there is nothing to write."""


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """Result of a launch.

    Attributes:
        reports: Reports of the runtime.
        status: Wait status of the process, if the launch ended it; None otherwise.
        requests: Requests of warps, if they were counted.
    """

    reports: tuple[Report, ...]
    status: int | None
    requests: tuple[Requests, ...] = ()


def guarded(tensor: Tensor, *, filled: bool = True) -> Tensor:
    """Copy a tensor into new memory that child processes share, between inaccessible pages.

    The copy has only the memory that its elements span, and the alignment of the tensor.

    Args:
        tensor: A strided tensor on the CPU.
        filled: True to copy the elements. Otherwise each byte is 0xff, so floats are nan.
    """
    item = tensor.element_size()
    lead = tensor.storage_offset() * item % ALIGNED // item
    extent = extent_of(tensor)
    page = mmap.PAGESIZE
    size = -(-(lead + extent) * item // page) * page
    memory = mmap.mmap(-1, size + 2 * page)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for at in (begin, begin + page + size):
        _libc().mprotect(ctypes.c_void_p(at), ctypes.c_size_t(page), 0)
    whole = torch.frombuffer(memory, dtype=torch.uint8, offset=page, count=max(size, 1)) if size else None
    if whole is None:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    if not filled:
        whole.fill_(0xFF)
    # The copy ends at the end of a page, as far as the alignment allows.
    slack = (size - (lead + extent) * item) // ALIGNED * ALIGNED // item
    elements = whole.view(tensor.dtype)[slack + lead : slack + lead + extent]
    if filled:
        elements.copy_(tensor.as_strided((extent,), (1,)))
    return elements.as_strided(tensor.shape, tensor.stride())


def run_launches(
    runs: Sequence[EmulatedRun], *, in_process: bool = False, counted: bool = False
) -> list[list[LaunchResult]]:
    """Run the launches of calls, one after the other, and return the result of each launch of each call.

    A child process runs them. If a kernel ends this process, a new child continues with the next launch.

    Args:
        runs: The launches of each call.
        in_process: True to run them in this process, for a debugger.
        counted: True to count the requests of warps.
    """
    prepared = [_PreparedLaunch(run, at) for run in runs for at in range(len(run))]
    kind = (_CountedRecord if counted else _LaunchRecord) * len(prepared)
    records = kind.from_buffer(mmap.mmap(-1, max(ctypes.sizeof(kind), 1)))
    statuses: dict[int, int] = {}
    at = 0
    while at < len(prepared):
        if in_process:
            with _libraries_lock:
                prepared[at].run(records[at], handle_faults=False)
            at += 1
            continue
        status = _run_in_child(prepared[at:], records[at:])
        ended = next((n for n, record in enumerate(records[at:], at) if not record.outcome.finished), None)
        if ended is None:
            break
        statuses[ended] = status
        at = ended + 1
    results = iter([_copied(each, statuses.get(number)) for number, each in enumerate(records)])
    return [[next(results) for _ in run] for run in runs]


def _copied(record: Any, status: int | None) -> LaunchResult:
    """Copy the runtime's record of a launch."""
    reports, requests = record.outcome.reports, record.outcome.requests
    return LaunchResult(
        tuple(map(Report.from_buffer_copy, record.reports[:reports])),
        status,
        tuple(map(Requests.from_buffer_copy, record.requests[:requests])),
    )


def _run_in_child(prepared: Sequence[_PreparedLaunch], records: Any) -> int:
    """Run launches in a forked process, which only calls the libraries, and return its status."""
    _libc().fflush(None)  # otherwise the child would print buffered output again
    with _libraries_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later: threads and fork
        parent = os.getpid()
        try:
            child = os.fork()
        except OSError as error:
            raise errors.ToolchainError(
                "no process can be forked for a CUDA kernel on the CPU",
                got=error.strerror,
                hint="free memory, or raise the limit of the number of processes",
            ) from error
    if child == 0:
        try:
            end_with_parent(parent)
            for each, record in zip(prepared, records, strict=True):
                each.run(record, handle_faults=True)
        finally:
            os._exit(0)
    try:
        _, status = os.waitpid(child, 0)
    except BaseException:  # for example Ctrl-C: nothing else ends the child
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    return status


class _PreparedLaunch:
    """Launch with prepared arguments, so that a forked process only has to call its library.

    Args:
        run: The launches of a call.
        at: Index of the launch.
    """

    def __init__(self, run: EmulatedRun, at: int) -> None:
        self.launch = launch = run[at]
        self.first = all(each.library.path != launch.library.path for each in run[:at])
        last = at + 1 == len(run)
        self.regions = (_Region * max(len(launch.tensors), 1))()
        self.masks = [_elements_of(each.tensor) for each in launch.tensors]
        for index, (each, mask) in enumerate(zip(launch.tensors, self.masks, strict=True)):
            item = each.tensor.element_size()
            self.regions[index] = _Region(
                each.tensor.data_ptr(),
                extent_of(each.tensor) * item,
                None if mask is None else mask.data_ptr(),
                None if each.marks is None else each.marks.data_ptr(),
                item,
                int(each.use.writable),
                int(each.use.initialized),
                int(each.use.complete and last),
            )
        addresses = [launch.tensors[index].tensor.data_ptr() for index in launch.passed]
        self.packed = launch.packed.with_addresses(addresses)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.packed))
        offsets = launch.packed.offsets
        self.parameters = (ctypes.c_void_p * max(len(offsets), 1))(*(base + offset for offset in offsets))

    def run(self, record: Any, *, handle_faults: bool) -> None:
        """Run the launch in this process."""
        launch = self.launch
        number = ORDERS.index(launch.order.name)
        limits = (THREAD_STEPS, BLOCK_STEPS, STEPS)
        counted = len(record.requests)
        options = _Options(
            number,
            MAX_REPORTS,
            launch.order.seed,
            *limits,
            int(handle_faults),
            counted,
            int(self.first),
            0,
            ctypes.addressof(record.requests) if counted else None,
        )
        launch.library.handle.emulated_run(
            ctypes.c_int(launch.entry),
            self.parameters,
            (ctypes.c_uint * 3)(*launch.geometry.grid),
            (ctypes.c_uint * 3)(*launch.geometry.block),
            ctypes.c_uint(launch.geometry.shared),
            self.regions,
            ctypes.c_int(len(launch.tensors)),
            ctypes.byref(options),
            record.reports,
            ctypes.byref(record.outcome),
        )


def _elements_of(tensor: Tensor) -> Tensor | None:
    """Mark the elements of a tensor in the memory that it spans; None if there are no gaps between them."""
    extent = extent_of(tensor)
    if extent <= tensor.numel() and not any(step == 0 for step in tensor.stride()):
        return None
    marks = torch.zeros(extent, dtype=torch.uint8)
    marks.as_strided(tensor.shape, tensor.stride()).fill_(1)
    return marks


def _libc() -> Any:
    return ctypes.CDLL(None)
