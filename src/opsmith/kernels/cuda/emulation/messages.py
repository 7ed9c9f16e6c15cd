"""Messages about emulated kernels: for each kind of report of the runtime its cause, words and hint."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from opsmith.kernels.cuda.emulation.launch import IN_SHARED, Kind, Report
from opsmith.kernels.cuda.emulation.places import ReportReader, index_of, thread_words, verb
from opsmith.kernels.cuda.emulation.source_lines import SourceLine
from opsmith.kernels.cuda.source import CudaSource
from opsmith.kernels.on_cpu import NOTE, SKIPPED, CpuFinding


@dataclass(frozen=True, slots=True)
class EmulationFinding(CpuFinding):
    """Finding about a launch.

    Attributes:
        kind: Kind of the report.
    """

    kind: Kind = field(kw_only=True)


def _finding(
    reader: ReportReader,
    report: Report,
    cause: str,
    message: str,
    hint: str = "",
    other: SourceLine | None = None,
) -> EmulationFinding:
    place = reader.place(report.pc, report.file, report.line)
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


def _out_of_bounds(reader: ReportReader, report: Report) -> EmulationFinding:
    words = reader.memory(report, verb(report.write))
    hint = "compare the index with the size before the access"
    return _finding(reader, report, "out-of-bounds", f"{thread_words(report)} {words}", hint)


def _between_elements(reader: ReportReader, report: Report) -> EmulationFinding:
    given = reader.tensor(report)
    message = (
        f"{thread_words(report)} {verb(report.write)} {report.size} bytes between the elements of "
        f"`{given.label}` {list(given.tensor.shape)}, whose strides are {list(given.tensor.stride())}"
    )
    hint = "index a view by `x(i, j)`, which knows its strides, or take it as `Contiguous`"
    return _finding(reader, report, "out-of-bounds", message, hint)


def _input_written(reader: ReportReader, report: Report) -> EmulationFinding:
    message = f"{thread_words(report)} {reader.memory(report, 'writes')}, which is an input"
    hint = "write into a result, or declare the operator to write in place"
    return _finding(reader, report, "mutates-input", message, hint)


def _no_memory(reader: ReportReader, report: Report) -> EmulationFinding:
    words = (
        "of a local variable of another thread" if report.kind == Kind.OTHER_STACK else "far from any tensor"
    )
    message = f"{thread_words(report)} {verb(report.write)} {report.size} bytes {words}"
    hint = "see that the pointer is one of a parameter, and the offset within its tensor"
    return _finding(reader, report, "out-of-bounds", message, hint)


def _shared_out_of_bounds(reader: ReportReader, report: Report) -> EmulationFinding:
    size = reader.launch.geometry.shared
    message = (
        f"{thread_words(report)} {verb(report.write)} {report.size} bytes of dynamic shared memory at byte "
        f"{report.offset}, and a block has {size}"
    )
    return _finding(reader, report, "out-of-bounds", message, "give the launch more by `shared=`")


def _beyond_shared_variable(reader: ReportReader, report: Report) -> EmulationFinding:
    variable = reader.shared_before(report.offset)
    if variable is None:
        words = "before its first variable"
    else:
        beyond = report.offset - variable.offset - variable.size
        distance = "beyond" if beyond < 0 else "just behind" if not beyond else f"{beyond} bytes behind"
        words = f"{distance} the end of `{variable.name}`, which has {variable.size} bytes"
    message = f"{thread_words(report)} {verb(report.write)} {report.size} bytes of shared memory {words}"
    hint = "compare the index with the size of the array, or make the array larger"
    return _finding(reader, report, "out-of-bounds", message, hint)


def _array_index(reader: ReportReader, report: Report) -> EmulationFinding:
    message = f"{thread_words(report)} takes an index beyond the end of an array"
    hint = "compare the index with the size of the array"
    return _finding(reader, report, "out-of-bounds", message, hint)


def _uninitialized(reader: ReportReader, report: Report) -> EmulationFinding:
    words = reader.memory(report, "reads")
    message = f"{thread_words(report)} {words}, which no thread has written"
    hint = (
        "write shared memory before it is read, in each block"
        if report.region == IN_SHARED
        else "memory is not zero before the launch: write each element before it is read, or name it in "
        "`initial=`"
    )
    return _finding(reader, report, "uninitialized", message, hint)


def _race(reader: ReportReader, report: Report) -> EmulationFinding:
    other = reader.place(report.other_pc)
    same_block = str(report.block) == str(report.other_block)
    block = "the same block" if same_block else f"block {report.other_block}"
    message = (
        f"{thread_words(report)} {reader.memory(report, verb(report.write))}, which thread "
        f"{report.other_thread} of {block} {verb(report.other_write)} at {other.where}, and nothing "
        "orders the two accesses"
    )
    if not same_block:
        hint = "blocks run in any order: let one block alone write an element, or use atomics"
    elif report.write and report.other_write and other.where == reader.place(report.pc).where:
        hint = "let one thread write the element, as by `if (threadIdx.x == 0)`, or use atomics"
    else:
        hint = "put `__syncthreads()` between the two, or `__syncwarp()` where all threads are of one warp"
    return _finding(reader, report, "race", message, hint, other)


def _misaligned(reader: ReportReader, report: Report) -> EmulationFinding:
    name = re.sub(r"\b(?:struct|class) |'", "", (report.text or b"").decode(errors="replace"))
    place = f" {reader.memory(report, size=False)}" if report.region >= IN_SHARED else " an address"
    what = f" as `{name}`" if name else ""
    message = f"{thread_words(report)} uses{place}{what}, which must lie at a multiple of {report.size} bytes"
    hint = "use a wide type only where the address is a multiple of its size: not in a slice or an odd row"
    return _finding(reader, report, "misaligned", message, hint)


def _divergent_barrier(reader: ReportReader, report: Report) -> EmulationFinding:
    other = reader.place(0, report.file, report.other_line)
    message = (
        f"{thread_words(report)} waits at this barrier, and thread {report.other_thread} of the same "
        f"block at {other.where}"
    )
    hint = "let all threads of a block reach the same `__syncthreads()`: put it outside of conditions"
    return _finding(reader, report, "divergent-barrier", message, hint, other)


def _barrier_after_exit(reader: ReportReader, report: Report) -> EmulationFinding:
    place, last = reader.place(0, report.file, report.line), reader.place(report.other_pc)
    others = report.size - 1
    went_around = report.other_pc and last.file == place.file and last.number > place.number
    if report.other_write or went_around or not _returns_before(reader.source, place):
        message = (
            f"thread {report.other_thread} of block {report.block}"
            + (f" and {_threads(others)} more end" if others else " ends")
            + f" without reaching this barrier{' again' if report.other_write else ''}, at which "
            f"{thread_words(report)} waits"
        )
        hint = "let all threads of a block reach each `__syncthreads()`: put it outside of conditions"
        return _finding(reader, report, "divergent-barrier", message, hint)
    message = f"{_threads(report.size)} of block {report.block} returned before this barrier"
    return _finding(reader, report, NOTE, message, "prefer a condition around the work to a `return`")


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _returns_before(source: CudaSource, barrier: SourceLine) -> bool:
    """Return True if a `return` of the kernel stands before a barrier: threads may end there on purpose.

    A barrier in another function counts as one behind the whole kernel.
    """
    lines = source.text.split("\n")[source.at - source.line :]
    body = _body("\n".join(line.partition("//")[0] for line in lines))
    number = barrier.number - source.at
    if barrier.file == source.path and 0 <= number <= body.count("\n"):
        body = "\n".join(body.split("\n")[:number])
    return re.search(r"\breturn\s*;", body) is not None


def _body(text: str) -> str:
    """Return the text up to the end of the function that begins it."""
    depth = 0
    for match in re.finditer(r"[{}]", text):
        depth += 1 if match[0] == "{" else -1
        if not depth:
            return text[: match.end()]
    return text


def _deadlock(reader: ReportReader, report: Report) -> EmulationFinding:
    other = reader.place(0, report.file, report.other_line) if report.other_line else None
    waits = f"; thread {report.other_thread} waits at {other.where}" if other else ""
    message = f"{thread_words(report)} waits for lanes of its mask that do not come{waits}"
    hint = "name in the mask the lanes that take part, and no others"
    return _finding(reader, report, "divergent-barrier", message, hint, other)


def _absent_lane(reader: ReportReader, report: Report) -> EmulationFinding:
    message = (
        f"{thread_words(report)} takes the value of lane {report.size}, which has no part in the shuffle"
    )
    hint = "let all lanes that are read take part: put the shuffle outside of conditions"
    return _finding(reader, report, "divergent-barrier", message, hint)


def _not_in_mask(reader: ReportReader, report: Report) -> EmulationFinding:
    message = f"{thread_words(report)} is lane {report.size}, which its own mask does not name"
    hint = "name in the mask each lane that takes part"
    return _finding(reader, report, "divergent-barrier", message, hint)


def _not_written(reader: ReportReader, report: Report) -> EmulationFinding:
    given = reader.tensor(report)
    first = index_of(given.tensor, report.offset)
    message = (
        f"it does not write {report.count} of {given.tensor.numel()} elements of `{given.label}` "
        f"{list(given.tensor.shape)}, the first at {first}"
    )
    hint = "let the grid cover all elements, and write each"
    return EmulationFinding(
        "uninitialized", message, reader.source.where, label=given.label, hint=hint, kind=Kind.NOT_WRITTEN
    )


def _undefined(reader: ReportReader, report: Report) -> EmulationFinding:
    text = (report.text or b"").decode(errors="replace")
    return _finding(reader, report, "undefined", f"{thread_words(report)}: {text}")


def _trap(reader: ReportReader, report: Report) -> EmulationFinding:
    text = (report.text or b"").decode(errors="replace")
    return _finding(reader, report, "raises", f"{thread_words(report)} is stopped by {text}")


def _endless(reader: ReportReader, report: Report) -> EmulationFinding:
    message = f"{thread_words(report)} does not end: it was in this line when it was stopped"
    hint = "see that the loop's condition becomes false, and that what it waits for is written"
    return _finding(reader, report, "endless", message, hint)


def _too_long(reader: ReportReader, report: Report) -> EmulationFinding:
    message = "the launch takes more steps than are emulated"
    return _finding(reader, report, SKIPPED, message, "try it on smaller tensors")


def _out_of_memory(reader: ReportReader, report: Report) -> EmulationFinding:
    message = "this machine has no memory for the launch"
    return EmulationFinding(
        SKIPPED, message, reader.source.where, hint="try it on smaller tensors", kind=Kind.OUT_OF_MEMORY
    )


def ended_process(source: CudaSource, status: int) -> EmulationFinding:
    """Return the finding about a process that ended in a launch without a report of the runtime.

    Args:
        source: The kernel.
        status: Wait status of the process.
    """
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL:
        message = "the process in which it ran was killed, as where memory runs out"
        return EmulationFinding(
            SKIPPED, message, source.where, hint="try it on smaller tensors", kind=Kind.OUT_OF_MEMORY
        )
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    message = f"the process in which it ran ended {how}"
    cause = "raises" if code in (0, -signal.SIGABRT) else "out-of-bounds"
    return EmulationFinding(cause, message, source.where, kind=Kind.CRASH)


def _waits_for_block(reader: ReportReader, report: Report) -> EmulationFinding:
    message = f"{thread_words(report)} waits for another block, and blocks run one after the other here"
    return _finding(reader, report, SKIPPED, message, "launch two kernels in place of a barrier of the grid")


def _crash(reader: ReportReader, report: Report) -> EmulationFinding:
    message = f"{thread_words(report)} uses memory that is not there, and the process ends"
    return _finding(reader, report, "out-of-bounds", message, "see that the pointer is valid")


def _stack_overflow(reader: ReportReader, report: Report) -> EmulationFinding:
    message = f"{thread_words(report)} needs more of the stack than there is: 192 KiB here"
    hint = "end the recursion, or keep large arrays in shared memory"
    return _finding(reader, report, "out-of-bounds", message, hint)


def _unordered_sum(reader: ReportReader, report: Report) -> EmulationFinding:
    name = f"`{reader.tensor(report).label}`" if report.region >= 0 else "memory"
    name = "shared memory" if report.region == IN_SHARED else name
    message = (
        f"several threads add floating-point numbers to one element of {name} in no fixed order, and each "
        "order rounds otherwise"
    )
    hint = "say so by `deterministic=False` in `op.kernel(...)`"
    return _finding(reader, report, NOTE, message, hint)


MESSAGES: dict[Kind, Callable[[ReportReader, Report], EmulationFinding]] = {
    Kind.OUT_OF_BOUNDS: _out_of_bounds,
    Kind.BETWEEN_ELEMENTS: _between_elements,
    Kind.INPUT_WRITTEN: _input_written,
    Kind.NO_MEMORY: _no_memory,
    Kind.OTHER_STACK: _no_memory,
    Kind.SHARED_OUT_OF_BOUNDS: _shared_out_of_bounds,
    Kind.ARRAY_INDEX: _array_index,
    Kind.UNINITIALIZED_SHARED: _uninitialized,
    Kind.UNINITIALIZED_RESULT: _uninitialized,
    Kind.RACE: _race,
    Kind.MISALIGNED: _misaligned,
    Kind.DIVERGENT_BARRIER: _divergent_barrier,
    Kind.BARRIER_AFTER_EXIT: _barrier_after_exit,
    Kind.DEADLOCK: _deadlock,
    Kind.ABSENT_LANE: _absent_lane,
    Kind.NOT_IN_MASK: _not_in_mask,
    Kind.NOT_WRITTEN: _not_written,
    Kind.UNDEFINED: _undefined,
    Kind.TRAP: _trap,
    Kind.ENDLESS: _endless,
    Kind.TOO_LONG: _too_long,
    Kind.WAITS_FOR_BLOCK: _waits_for_block,
    Kind.CRASH: _crash,
    Kind.STACK_OVERFLOW: _stack_overflow,
    Kind.UNORDERED_SUM: _unordered_sum,
    Kind.BEYOND_SHARED_VARIABLE: _beyond_shared_variable,
    Kind.OUT_OF_MEMORY: _out_of_memory,
}
"""Function that makes the finding of each kind of report."""
