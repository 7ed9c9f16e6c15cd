"""Places that reports of the runtime name: lines of the author, elements of tensors, shared memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from opsmith.kernels.cuda.emulation.compiler import SharedVariable
from opsmith.kernels.cuda.emulation.launch import (
    IN_GLOBAL_VARIABLE,
    IN_SHARED,
    EmulatedLaunch,
    LaunchTensor,
    Report,
)
from opsmith.kernels.cuda.emulation.source_lines import SourceLine, SourceLines
from opsmith.kernels.cuda.source import CudaSource
from opsmith.torch_library.result_layouts import extent_of


class ReportReader:
    """Reader of the reports of one launch: author's lines, and words for places in memory."""

    def __init__(self, source: CudaSource, launch: EmulatedLaunch, reports: Sequence[Report]) -> None:
        self.source, self.launch = source, launch
        counters = (pc for each in reports for pc in (each.pc, each.other_pc))
        self.lines = SourceLines(source, launch.library.path, counters)

    def place(self, pc: int, file: bytes | None = None, number: int = 0) -> SourceLine:
        """Return the author's line of a program counter, or of a file and line that the kernel passed."""
        return self.lines.at(pc, file, number)

    def memory(self, report: Report, write: str = "reads", size: bool = True) -> str:
        """Return the words for an access: verb, bytes and place."""
        words = f"{write} {report.size} bytes of " if size else ""
        if report.region == IN_SHARED:
            return f"{words}shared memory at byte {report.offset}"
        if report.region == IN_GLOBAL_VARIABLE:
            return f"{words}a global variable"
        if report.region < 0:
            return f"{write} {report.size} bytes" if size else "memory"
        return f"{words}{_element_words(self.tensor(report), report.offset)}"

    def shared_before(self, offset: int) -> SharedVariable | None:
        """Return the last shared variable that begins at or before a byte of shared memory."""
        before = [each for each in self.launch.library.shared if each.offset <= offset]
        return before[-1] if before else None

    def tensor(self, report: Report) -> LaunchTensor:
        """Return the tensor that a report is about."""
        given: LaunchTensor = self.launch.tensors[report.region]
        return given


def _element_words(given: LaunchTensor, offset: int) -> str:
    """Return the words for a byte of a tensor, or beside it.

    Args:
        given: The tensor.
        offset: Bytes from its first element.
    """
    tensor, name = given.tensor, f"`{given.label}` {list(given.tensor.shape)}"
    item, extent = tensor.element_size(), extent_of(tensor)
    offset = int(offset)
    if offset < 0:
        return f"memory before {name}: {_items(-offset, item)} before its first element"
    if offset >= extent * item:
        beyond = offset - extent * item
        return f"memory behind {name}: " + (
            "just behind its last element" if not beyond else f"{_items(beyond, item)} further than its end"
        )
    return f"{name} at element {index_of(tensor, offset)}"


def _items(bytes: int, item: int) -> str:
    if bytes % item:
        return f"{bytes} bytes"
    return f"{bytes // item} element{'s' if bytes // item > 1 else ''}"


def index_of(tensor: Tensor, offset: int) -> list[int]:
    """Return the index of the element at an offset in bytes, or of the one before it."""
    left, index = offset // tensor.element_size(), [0] * tensor.dim()
    for at in sorted(range(tensor.dim()), key=tensor.stride, reverse=True):
        if tensor.stride(at) and tensor.shape[at] > 1:
            index[at] = min(left // tensor.stride(at), tensor.shape[at] - 1)
            left -= index[at] * tensor.stride(at)
    return index


def thread_words(report: Report) -> str:
    """Return the words for the thread of a report."""
    return f"thread {report.thread} of block {report.block}"


def verb(write: int) -> str:
    """Return the verb for an access."""
    return "writes" if write else "reads"
