"""Findings about an emulated kernel, from the runtime's reports: cause, message and hint of each kind."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from opsmith.kernels.cuda.emulation.launch import IN_SHARED, EmulatedLaunch, Kind, LaunchResult, Report
from opsmith.kernels.cuda.emulation.places import (
    ReportReader,
    SourceLine,
    index_of,
    text_of,
    thread_words,
    verb,
)
from opsmith.kernels.cuda.source import CudaSource
from opsmith.kernels.on_cpu import NOTE, SKIPPED, CpuFinding

_PRECEDENCE = (
    *("misaligned", "mutates-input", "out-of-bounds", "undefined", "raises", "divergent-barrier", "race"),
    *("endless", "uninitialized", SKIPPED, NOTE),
)
"""Causes, in an order in which earlier ones explain later ones: an access beyond a row may cause a race."""

_ENDING = (Kind.CRASH, Kind.STACK_OVERFLOW, Kind.OUT_OF_MEMORY)
"""Kinds of reports that end the process of the runtime."""

_POINTER = "check that the pointer comes from a parameter, and that the offset is within the tensor"
_SMALLER = "try smaller tensors"


@dataclass(frozen=True, slots=True)
class EmulationFinding(CpuFinding):
    """Finding about a launch.

    Attributes:
        kind: Kind of the report.
    """

    kind: Kind = field(kw_only=True)


Message = Callable[[ReportReader, Report], EmulationFinding]
"""Function that makes a finding from a report."""


def findings_of(source: CudaSource, launch: EmulatedLaunch, result: LaunchResult) -> list[EmulationFinding]:
    """Return the findings of a launch; findings that explain others come first."""
    reader = ReportReader(source, launch, result.reports)
    found = [MESSAGES[Kind(each.kind)](reader, each) for each in _root_reports(result.reports)]
    if result.status is not None and not any(each.kind in _ENDING for each in result.reports):
        found.append(_ended_process(source, result.status))
    return sorted(found, key=lambda each: _PRECEDENCE.index(each.cause))


def _root_reports(reports: Iterable[Report]) -> list[Report]:
    """Leave out the reports that other reports explain.

    A race explains reads of uninitialized memory at the same place. If a thread was ended, or a launch was
    given up, this explains elements of a result that are not written.
    """
    found = list(reports)
    kinds = {Kind(each.kind) for each in found}
    racing = {pc for each in found if each.kind == Kind.RACE for pc in (each.pc, each.other_pc)}
    ended = kinds - {Kind.NOT_WRITTEN, Kind.RACE, Kind.BARRIER_AFTER_EXIT, Kind.UNORDERED_SUM}
    return [
        each
        for each in found
        if not (
            (each.kind in (Kind.UNINITIALIZED_SHARED, Kind.UNINITIALIZED_RESULT) and each.pc in racing)
            or (each.kind == Kind.NOT_WRITTEN and ended)
        )
    ]


def _finding(
    reader: ReportReader,
    report: Report,
    cause: str,
    message: str,
    hint: str = "",
    other: SourceLine | None = None,
) -> EmulationFinding:
    place = reader.lines.at(report.pc, report.file, report.line)
    return EmulationFinding(
        cause,
        message,
        place.where,
        place.text,
        other.where if other else "",
        other.text if other else "",
        reader.tensor(report).label if report.region >= 0 else None,
        report.count,
        hint,
        kind=Kind(report.kind),
    )


def _says(cause: str, text: str, hint: str = "") -> Message:
    """Return a function that makes a finding from these texts, with `ReportReader.words` in braces."""
    return lambda reader, report: _finding(reader, report, cause, text.format(**reader.words(report)), hint)


def _beyond_shared_variable(reader: ReportReader, report: Report) -> EmulationFinding:
    variable = reader.shared_before(report.offset)
    if variable is None:
        words = "before its first variable"
    else:
        beyond = report.offset - variable.offset - variable.size
        distance = "beyond" if beyond < 0 else "just after" if not beyond else f"{beyond} bytes after"
        words = f"{distance} the end of `{variable.name}`, which has {variable.size} bytes"
    message = f"{thread_words(report)} {verb(report.write)} {report.size} bytes of shared memory {words}"
    hint = "compare the index with the size of the array, or make the array larger"
    return _finding(reader, report, "out-of-bounds", message, hint)


def _race(reader: ReportReader, report: Report) -> EmulationFinding:
    other = reader.lines.at(report.other_pc)
    same_block = str(report.block) == str(report.other_block)
    block = "the same block" if same_block else f"block {report.other_block}"
    message = (
        f"{thread_words(report)} {reader.memory(report, verb(report.write))}; thread {report.other_thread} "
        f"of {block} {verb(report.other_write)} the same memory at {other.where}, and nothing orders the "
        "two accesses"
    )
    if not same_block:
        hint = "blocks run in any order: let only one block write an element, or use atomics"
    elif report.write and report.other_write and other.where == reader.lines.at(report.pc).where:
        hint = "let one thread write the element, for example by `if (threadIdx.x == 0)`, or use atomics"
    else:
        hint = (
            "put `__syncthreads()` between the two accesses, or `__syncwarp()` if all threads are in one warp"
        )
    return _finding(reader, report, "race", message, hint, other)


def _misaligned(reader: ReportReader, report: Report) -> EmulationFinding:
    name = re.sub(r"\b(?:struct|class) |'", "", text_of(report))
    place = f" {reader.memory(report, size=False)}" if report.region >= IN_SHARED else " an address"
    what = f" as `{name}`" if name else ""
    message = f"{thread_words(report)} uses{place}{what}, which must be aligned to {report.size} bytes"
    hint = "use a wide type only at an address that is a multiple of its size, not in a slice or an odd row"
    return _finding(reader, report, "misaligned", message, hint)


def _divergent_barrier(reader: ReportReader, report: Report) -> EmulationFinding:
    other = reader.lines.at(0, report.file, report.other_line)
    message = (
        f"{thread_words(report)} waits at this barrier, but thread {report.other_thread} of the same "
        f"block waits at {other.where}"
    )
    hint = "let all threads of a block reach the same `__syncthreads()`: put it outside of conditions"
    return _finding(reader, report, "divergent-barrier", message, hint, other)


def _barrier_after_exit(reader: ReportReader, report: Report) -> EmulationFinding:
    place, last = reader.lines.at(0, report.file, report.line), reader.lines.at(report.other_pc)
    others = report.size - 1
    went_around = report.other_pc and last.file == place.file and last.number > place.number
    if report.other_write or went_around or not _returns_before(reader.source, place):
        message = (
            f"thread {report.other_thread} of block {report.block}"
            + (f" and {others} other thread{'s' if others > 1 else ''} end" if others else " ends")
            + f" without reaching this barrier{' again' if report.other_write else ''}; "
            f"{thread_words(report)} waits there"
        )
        hint = "let all threads of a block reach each `__syncthreads()`: put it outside of conditions"
        return _finding(reader, report, "divergent-barrier", message, hint)
    message = f"{_threads(report.size)} of block {report.block} returned before this barrier"
    return _finding(reader, report, NOTE, message, "use a condition around the work instead of a `return`")


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _returns_before(source: CudaSource, barrier: SourceLine) -> bool:
    """Return True if the kernel has a `return` before a barrier, where threads may end on purpose.

    A barrier in a different function counts as a barrier after the whole kernel.
    """
    lines = source.text.split("\n")[source.at - source.line :]
    body = _body("\n".join(line.partition("//")[0] for line in lines))
    number = barrier.number - source.at
    if barrier.file == source.path and 0 <= number <= body.count("\n"):
        body = "\n".join(body.split("\n")[:number])
    return re.search(r"\breturn\s*;", body) is not None


def _body(text: str) -> str:
    """Return the part of a text up to the end of the function at its beginning."""
    depth = 0
    for match in re.finditer(r"[{}]", text):
        depth += 1 if match[0] == "{" else -1
        if not depth:
            return text[: match.end()]
    return text


def _deadlock(reader: ReportReader, report: Report) -> EmulationFinding:
    other = reader.lines.at(0, report.file, report.other_line) if report.other_line else None
    waits = f"; thread {report.other_thread} waits at {other.where}" if other else ""
    message = f"{thread_words(report)} waits for lanes of its mask that do not come{waits}"
    hint = "the mask must name the lanes that take part, and no others"
    return _finding(reader, report, "divergent-barrier", message, hint, other)


def _not_written(reader: ReportReader, report: Report) -> EmulationFinding:
    given = reader.tensor(report)
    first = index_of(given.tensor, report.offset)
    message = (
        f"the kernel does not write {report.count} of {given.tensor.numel()} elements of `{given.label}` "
        f"{list(given.tensor.shape)}; the first is at {first}"
    )
    hint = "let the grid cover all elements, and write each element"
    return EmulationFinding(
        "uninitialized", message, reader.source.where, label=given.label, hint=hint, kind=Kind.NOT_WRITTEN
    )


def _ended_process(source: CudaSource, status: int) -> EmulationFinding:
    """Return the finding for a process that ended in a launch without a report of the runtime."""
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL:
        message = "the process that ran the kernel was killed, for example because memory ran out"
        return EmulationFinding(SKIPPED, message, source.where, hint=_SMALLER, kind=Kind.OUT_OF_MEMORY)
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    message = f"the process that ran the kernel ended {how}"
    cause = "raises" if code in (0, -signal.SIGABRT) else "out-of-bounds"
    return EmulationFinding(cause, message, source.where, kind=Kind.CRASH)


MESSAGES: dict[Kind, Message] = {
    Kind.OUT_OF_BOUNDS: _says(
        "out-of-bounds", "{who} {accesses}", "compare the index with the size before the access"
    ),
    Kind.BETWEEN_ELEMENTS: _says(
        "out-of-bounds",
        "{who} {uses} {size} bytes between the elements of {tensor}, whose strides are {strides}",
        "index the view by `x(i, j)`, which uses its strides, or declare the view as `Contiguous`",
    ),
    Kind.INPUT_WRITTEN: _says(
        "mutates-input",
        "{who} {accesses}, but {holder} is an input",
        "write into a result, or declare the operator to write in place",
    ),
    Kind.NO_MEMORY: _says("out-of-bounds", "{who} {uses} {size} bytes far from any tensor", _POINTER),
    Kind.OTHER_STACK: _says(
        "out-of-bounds", "{who} {uses} {size} bytes of a local variable of another thread", _POINTER
    ),
    Kind.SHARED_OUT_OF_BOUNDS: _says(
        "out-of-bounds",
        "{who} {uses} {size} bytes of dynamic shared memory at byte {offset}, but a block has {shared} bytes",
        "give the launch more shared memory by `shared=`",
    ),
    Kind.ARRAY_INDEX: _says(
        "out-of-bounds",
        "{who} takes an index beyond the end of an array",
        "compare the index with the size of the array",
    ),
    Kind.UNINITIALIZED_SHARED: _says(
        "uninitialized",
        "{who} {reads}, which no thread has written",
        "write shared memory before it is read, in each block",
    ),
    Kind.UNINITIALIZED_RESULT: _says(
        "uninitialized",
        "{who} {reads}, which no thread has written",
        "memory is not zero before the launch: write each element before it is read, or name the "
        "tensor in `initial=`",
    ),
    Kind.RACE: _race,
    Kind.MISALIGNED: _misaligned,
    Kind.DIVERGENT_BARRIER: _divergent_barrier,
    Kind.BARRIER_AFTER_EXIT: _barrier_after_exit,
    Kind.DEADLOCK: _deadlock,
    Kind.ABSENT_LANE: _says(
        "divergent-barrier",
        "{who} takes the value of lane {size}, which has no part in the shuffle",
        "let all lanes that are read take part: put the shuffle outside of conditions",
    ),
    Kind.NOT_IN_MASK: _says(
        "divergent-barrier",
        "{who} is lane {size}, but its own mask does not name this lane",
        "the mask must name each lane that takes part",
    ),
    Kind.NOT_WRITTEN: _not_written,
    Kind.UNDEFINED: _says("undefined", "{who}: {text}"),
    Kind.TRAP: _says("raises", "{who} is stopped by {text}"),
    Kind.ENDLESS: _says(
        "endless",
        "{who} does not end: it was in this line when it was stopped",
        "check that the loop's condition becomes false; if the loop waits for a value, check that a thread "
        "writes it",
    ),
    Kind.TOO_LONG: _says(SKIPPED, "the launch takes more steps than the emulation runs", _SMALLER),
    Kind.WAITS_FOR_BLOCK: _says(
        SKIPPED,
        "{who} waits for another block, but here blocks run one after the other",
        "launch two kernels instead of a barrier of the grid",
    ),
    Kind.CRASH: _says(
        "out-of-bounds",
        "{who} uses memory that does not exist, and the process ends",
        "check that the pointer is valid",
    ),
    Kind.STACK_OVERFLOW: _says(
        "out-of-bounds",
        "{who} needs more stack than the emulation has: 192 KiB",
        "end the recursion, or keep large arrays in shared memory",
    ),
    Kind.UNORDERED_SUM: _says(
        NOTE,
        "several threads add floating-point numbers to one element of {holder} in no fixed order, and "
        "each order rounds differently",
        "declare `deterministic=False` in `op.kernel(...)`",
    ),
    Kind.BEYOND_SHARED_VARIABLE: _beyond_shared_variable,
    Kind.OUT_OF_MEMORY: _says(SKIPPED, "this machine has too little memory for the launch", _SMALLER),
}
"""Function that makes a finding, by kind of report."""
