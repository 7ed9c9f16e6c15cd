"""Places in the runtime's reports: the author's lines, elements of tensors, shared memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from opsmith.build.symbols import Line, lines_at
from opsmith.kernels.cpp.diagnostics import own_headers, quoted_from
from opsmith.kernels.cuda.emulation.compiler import SharedVariable
from opsmith.kernels.cuda.emulation.launch import (
    IN_GLOBAL_VARIABLE,
    IN_SHARED,
    EmulatedLaunch,
    LaunchTensor,
    Report,
)
from opsmith.kernels.cuda.source import CudaSource
from opsmith.torch_library.result_layouts import extent_of


@dataclass(frozen=True, slots=True)
class SourceLine:
    """Line of the author's source.

    Attributes:
        where: `file:line`.
        text: Text of the line; empty if it is unknown.
        file: The file.
        number: Number of the line, from 1.
    """

    where: str
    text: str
    file: str
    number: int


class SourceLines:
    """Lines of a kernel's source.

    Args:
        source: The kernel.
        library: The library that was compiled from it.
        counters: Program counters, as offsets in the library.
    """

    def __init__(self, source: CudaSource, library: Path, counters: Iterable[int]) -> None:
        self.source, self.headers = source, own_headers(source)
        ordered = sorted({*counters} - {0})
        self.chains = dict(zip(ordered, lines_at(library, ordered), strict=True))

    def at(self, counter: int, file: bytes | None = None, number: int = 0) -> SourceLine:
        """Return the author's line for a program counter, or for a file and line that the kernel passed."""
        chain = list(self.chains.get(counter, ()))
        if file is not None and number:
            chain.insert(0, Line("", file.decode(errors="replace"), number))
        for line in chain:
            if line.is_of(self.source.path):
                text = self.source.quoted(line.number).strip()
                return SourceLine(f"{self.source.path}:{line.number}", text, self.source.path, line.number)
            if line.file in self.headers or Path(line.file).resolve().as_posix() in self.headers:
                text = quoted_from(line.file, line.number).strip()
                return SourceLine(f"{line.file}:{line.number}", text, line.file, line.number)
        return SourceLine(self.source.where, "", self.source.path, self.source.at)


class ReportReader:
    """Reader of the reports of one launch: author's lines, and words for places in memory."""

    def __init__(self, source: CudaSource, launch: EmulatedLaunch, reports: Sequence[Report]) -> None:
        self.source, self.launch = source, launch
        counters = (pc for each in reports for pc in (each.pc, each.other_pc))
        self.lines = SourceLines(source, launch.library.path, counters)

    def words(self, report: Report) -> dict[str, str | int]:
        """Return texts for the parts of a report: its thread, the access, the memory."""
        use = verb(report.write)
        words: dict[str, str | int] = {
            "who": thread_words(report),
            "uses": use,
            "size": report.size,
            "offset": report.offset,
            "accesses": self.memory(report, use),
            "reads": self.memory(report, "reads"),
            "holder": "shared memory" if report.region == IN_SHARED else "memory",
            "shared": self.launch.geometry.shared,
            "text": text_of(report),
        }
        if report.region >= 0:
            given = self.tensor(report)
            words["holder"], words["strides"] = f"`{given.label}`", str(list(given.tensor.stride()))
            words["tensor"] = _named(given)
        return words

    def memory(self, report: Report, write: str = "reads", size: bool = True) -> str:
        """Return the text for an access: verb, bytes and place."""
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
    """Return the text for a byte in or near a tensor, by its offset from the first element."""
    tensor, name = given.tensor, _named(given)
    item, extent = tensor.element_size(), extent_of(tensor)
    offset = int(offset)
    if offset < 0:
        return f"memory before {name}: {_items(-offset, item)} before its first element"
    if offset >= extent * item:
        beyond = offset - extent * item
        return f"memory after {name}: " + (
            "just after its last element" if not beyond else f"{_items(beyond, item)} after its end"
        )
    return f"{name} at element {index_of(tensor, offset)}"


def _named(given: LaunchTensor) -> str:
    return f"`{given.label}` {list(given.tensor.shape)}"


def _items(bytes: int, item: int) -> str:
    if bytes % item:
        return f"{bytes} bytes"
    return f"{bytes // item} element{'s' if bytes // item > 1 else ''}"


def index_of(tensor: Tensor, offset: int) -> list[int]:
    """Return the index of the element at an offset in bytes, or of the element before it."""
    left, index = offset // tensor.element_size(), [0] * tensor.dim()
    for at in sorted(range(tensor.dim()), key=tensor.stride, reverse=True):
        if tensor.stride(at) and tensor.shape[at] > 1:
            index[at] = min(left // tensor.stride(at), tensor.shape[at] - 1)
            left -= index[at] * tensor.stride(at)
    return index


def thread_words(report: Report) -> str:
    """Return the text for the thread of a report."""
    return f"thread {report.thread} of block {report.block}"


def verb(write: int) -> str:
    """Return the verb for an access."""
    return "writes" if write else "reads"


def text_of(report: Report) -> str:
    """Return the text of a report; empty if it has none."""
    return (report.text or b"").decode(errors="replace")
