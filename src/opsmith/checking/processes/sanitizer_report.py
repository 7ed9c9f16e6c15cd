"""From what a process under sanitizers told to failures: what, of which argument, where, on which call."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from opsmith.build.cpp.sanitizer_reports import SanitizerReport
from opsmith.build.cpp.source import CppSource
from opsmith.build.cpp.warnings import unset_lines
from opsmith.build.symbols import Line
from opsmith.checking.processes.fork import SIGNALS
from opsmith.checking.processes.redzones import FENCE, Span
from opsmith.checking.processes.sanitizer_parent import Job, Run, Trial
from opsmith.checking.report import Failure

OUTSIDE = {
    "heap-buffer-overflow",
    "use-after-poison",
    "stack-buffer-overflow",
    "stack-buffer-underflow",
    "dynamic-stack-buffer-overflow",
    "global-buffer-overflow",
    "unknown-crash",
    "SEGV",
    "BUS",
}
"""AddressSanitizer's words for what lies beyond something."""

GONE = {
    "heap-use-after-free": "memory that was given back",
    "stack-use-after-scope": "a variable whose scope has ended",
    "stack-use-after-return": "a variable of a function that has returned",
}

MISUSED = {
    "double-free": "it gives the same memory back twice",
    "attempting": "it gives back memory that is none of its own, or was not allocated",
    "alloc-dealloc-mismatch": "it gives memory back in another way than it got it, as by `new` and `free`",
    "memcpy-param-overlap": "it copies memory onto itself with `memcpy`",
    "negative-size-param": "it copies a negative number of bytes",
}

ENDS = {
    "stack-overflow": "it needs more of the stack than there is",
    "FPE": "it divides a whole number by zero",
    "ABRT": "it calls `abort`, or throws where nothing catches",
    "ILL": "it runs an instruction that this processor does not have",
}
"""Its words for what ends a process, and what a kernel then does."""

OWN = re.compile(r"<cpp of [^>]*>$")
"""How the text is called in the process, where it stands in no file."""


def apart(failures: Sequence[Failure]) -> list[Failure]:
    """The failures, without those that tell less of what another one tells of the same line.

    Two builds run, of which one does not know where its results lie; and both sanitizers see a null pointer,
    an index that an array does not have, or a division by zero.
    """
    outside = [each for each in failures if each.cause == "out-of-bounds"]
    named = {each.where for each in outside if each.input is not None}
    told = {each.where for each in outside}
    undefined = {each.where for each in failures if each.cause == "undefined"}
    also = {each.where: each.message for each in failures if each.cause == "undefined" and each.where in told}
    kept = []
    for failure in failures:
        if failure.cause == "out-of-bounds" and failure.input is None and failure.where in named:
            continue
        if failure.cause == "undefined" and failure.where in told:
            continue
        if failure.message.startswith(ENDS["FPE"]) and failure.where in undefined:
            continue
        if failure.cause == "out-of-bounds" and failure.where in also:
            failure = replace(failure, evidence={**failure.evidence, "also": also[failure.where]})
        kept.append(failure)
    return kept


@dataclass(frozen=True)
class KernelFindings:
    """The failures of one kernel.

    Args:
        check: Name of the property.
        job: What was done.
        source: The kernel.
        limit_s: Seconds that a call was given.
    """

    check: str
    job: Job
    source: CppSource
    limit_s: float

    def of(self, run: Run) -> Iterator[Failure]:
        """What one call shows."""
        trial = self.job.trials[run.trial]
        for report in run.reports:
            yield self._reported(report, run, trial)
        if run.late and not run.reports:
            yield self._late(trial, self.source.where)
        elif run.status is not None and not run.reports:
            yield self._died(run.status, run.lines, trial)
        for depends in run.depends:
            yield self._depending(depends, trial)

    def _reported(self, report: SanitizerReport, run: Run, trial: Trial) -> Failure:
        where, line = self._place(report.lines)
        if run.late and report.kind == "ABRT":
            return self._late(trial, where, line)
        evidence = self._evidence(trial, line, report.words)
        if report.kind == "undefined":
            message = f"C++ does not say what this gives: {report.words}"
            return Failure(self.check, None, "undefined", message, where, evidence)
        size = f" {report.size} bytes" if report.size else ""
        verb = {"READ": f"reads{size}", "WRITE": f"writes{size}"}.get(report.way, "uses memory")
        if report.kind in GONE:
            message = f"it {verb} of {GONE[report.kind]}"
            message += f": `{report.variable}`" if report.variable else ""
            return Failure(self.check, None, "out-of-bounds", message, where, evidence)
        if report.kind in OUTSIDE:
            label, beside = self._beside(report, run.spans)
            return Failure(self.check, label, "out-of-bounds", f"it {verb} {beside}", where, evidence)
        if report.kind in MISUSED:
            return Failure(self.check, None, "out-of-bounds", MISUSED[report.kind], where, evidence)
        message = ENDS.get(report.kind, "the process dies")
        return Failure(self.check, None, "raises", f"{message}, and the process dies", where, evidence)

    def _beside(self, report: SanitizerReport, spans: Sequence[Span]) -> tuple[str | None, str]:
        """What was read or written beside: the argument or result, and in words."""
        if report.variable:
            return None, f"outside of the variable `{report.variable}`"
        address = report.address
        if address is None:
            return None, "outside of its memory"
        for span in spans:
            known = report.region is not None and report.region[0] == span.start
            low, high = span.start - span.fence, span.start + span.size + span.fence
            if known or low <= address < high:
                past = address - span.start - span.size
                far = (
                    f"{past} bytes after its end" if past >= 0 else f"{span.start - address} bytes before it"
                )
                if not past:
                    far = "just after its end"
                return span.label, f"outside of `{span.label}`, which has {span.size} bytes: {far}"
        if report.kind in ("SEGV", "BUS"):
            null = address < 4096
            return None, "through a null pointer" if null else "where there is no memory of this process"
        if report.region is None:
            return None, f"outside of its memory, more than {FENCE} bytes from any argument"
        _, far_, size, side = report.region
        what = {"after": f"{far_} bytes after the end of", "before": f"{far_} bytes before"}.get(
            side, "inside"
        )
        return None, f"outside of its memory: {what} a piece of {size} bytes"

    def _late(self, trial: Trial, where: str, line: str = "") -> Failure:
        evidence = {**self._evidence(trial, line), "limit": f"{self.limit_s:g} s"}
        message = f"a call did not finish within {self.limit_s:g} s" + "; it was in this line" * bool(line)
        return Failure(self.check, None, "raises", message, where, evidence)

    def _died(self, status: int, lines: Sequence[Line], trial: Trial) -> Failure:
        """A death of which the sanitizer says nothing."""
        where, line = self._place(lines)
        evidence = self._evidence(trial, line)
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
            how = f"the process dies of {name} ({SIGNALS.get(name) or signal.strsignal(number)})"
            evidence["signal"] = name
        else:
            how = f"it ends the process, with status {os.WEXITSTATUS(status)}, instead of returning"
            evidence["status"] = os.WEXITSTATUS(status)
        return Failure(self.check, None, "raises", how, where, evidence)

    def _depending(self, found: Any, trial: Trial) -> Failure:
        name = found["result"]
        count = f"{found['count']} of {found['of']} elements, the first at {found['first']}"
        if found["unwritten"]:
            message = f"it does not write all of `{name}`: {count}, are what was in memory before"
        else:
            message = (
                f"`{name}` depends on what a variable holds before something is written to it: {count}, "
                "differ with that"
            )
        where, line = self.source.where, ""
        if not found["unwritten"] and self.unset:
            number, words = self.unset[0]
            where, line = f"{self.source.path}:{number}", self.source.quoted(number).strip()
            message += f"; the compiler warns: {words}"
        return Failure(self.check, name, "uninitialized", message, where, self._evidence(trial, line))

    @cached_property
    def unset(self) -> list[tuple[int, str]]:
        """Lines that use a variable before it is set, as far as the compiler sees it, with its warnings."""
        return unset_lines(self.source, self.job.operator, self.job.dtypes)

    def _place(self, lines: Sequence[Line]) -> tuple[str, str]:
        """`file:line` of the author's innermost line, and that line; of the function where none is known."""
        for line in lines:
            # In the process the text stood for itself, and its lines were counted from 1.
            if OWN.search(line.file):
                number = line.number + self.source.line - 1
                return f"{self.source.path}:{number}", self.source.quoted(number).strip()
        return self.source.where, ""

    def _evidence(self, trial: Trial, line: str, tool: str = "") -> dict[str, Any]:
        evidence: dict[str, Any] = {"sample": trial.told}
        evidence.update({"layout": trial.odd} if trial.odd else {})
        evidence.update({"line": line} if line else {})
        evidence.update({"found by": tool} if tool.startswith("AddressSanitizer") else {})
        return evidence
