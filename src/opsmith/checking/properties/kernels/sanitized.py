"""Kernels in C++ under sanitizers: no access outside of their memory, no undefined behaviour."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from opsmith.build.symbols import Line
from opsmith.checking.exceptions import refuse_own
from opsmith.checking.output.replay import check_again
from opsmith.checking.processes.child import describe_exit
from opsmith.checking.processes.sanitizer_parent import (
    REDZONE,
    CallOutcome,
    JobOutcome,
    MemorySpan,
    SampleArguments,
    SanitizedCall,
    SanitizerJob,
    run_jobs,
)
from opsmith.checking.properties.kernels.sizes import kernel_sizes
from opsmith.checking.properties.kernels.unverified import unwritable
from opsmith.checking.property import Findings, Note, Property, Skipped
from opsmith.checking.report import Failure
from opsmith.checking.samples.cases import ALWAYS_CHECKED, LOW_PRECISION, dtype_name
from opsmith.checking.samples.memory_layouts import layouts_of
from opsmith.checking.samples.sample import Sample
from opsmith.checking.samples.variations import variations
from opsmith.checking.subject import Subject
from opsmith.core.cached_property import cached_property
from opsmith.core.kernels import Kernel, Rejected
from opsmith.judging.tensors import CPU
from opsmith.kernels.cpp.kernel import CppKernel
from opsmith.kernels.cpp.sanitizer import SanitizerReport, unset_lines
from opsmith.kernels.cpp.source import CppSource
from opsmith.torch_library.result_layouts import ResultLayout

NAME = "sanitized"

MOST_ELEMENTS = 20_000
"""Largest number of elements of a sample that is run in other layouts."""
BITS = ("a negated view", "a conjugate view")
"""Layouts that torch resolves before it calls a kernel."""


def run(subject: Subject) -> Findings:
    """Run each kernel in C++ on every sample, in every dtype that it takes, and in every layout."""
    kernels = [each for each in subject.kernels_on(CPU) if isinstance(each.given, CppKernel)]
    if not kernels:
        yield Skipped("it has no kernel in C++")
        return
    # The operator is not called in this process, which a faulty kernel might damage.
    safe = subject.by_reference()
    safe = replace(safe, samples=(*safe.samples, *variations(safe).samples))
    safe = replace(safe, samples=(*safe.samples, *kernel_sizes(safe)))
    jobs = [_job(safe, kernel) for kernel in kernels]
    outcomes = run_jobs([job for job in jobs if job.calls], subject.limit_s)
    for kernel, job in zip(kernels, jobs, strict=True):
        if not job.calls:
            yield Skipped(f"the kernel at {kernel.where} takes none of the samples")
            continue
        subject.ran.kernels.add(kernel)
        for finding in _kernel(kernel, job, next(outcomes), subject.limit_s):
            if isinstance(finding, Failure):
                finding = replace(finding, replay=check_again(subject, NAME))
            yield finding


def _kernel(kernel: Kernel, job: SanitizerJob, outcome: JobOutcome, limit_s: float) -> Findings:
    """Yield what the calls of one kernel showed."""
    findings = KernelFindings(job, _built(kernel).source, limit_s)
    failures = without_duplicates([failure for each in outcome.runs for failure in findings.of(each)])
    yield from failures
    raised = [each.raised for each in outcome.runs if each.raised is not None]
    what = f"of the {len(job.calls)} calls of the kernel at {kernel.where}"
    if outcome.left and failures:
        yield Note(f"{outcome.left} {what} were left out, after so many deaths")
    elif outcome.left:
        yield Skipped(f"{outcome.left} {what} were not made: their process ended without a report")
    if raised:
        words = f"{len(raised)} {what} raised: {raised[0].splitlines()[0]}"
        yield Note(words) if len(raised) < len(outcome.runs) else Skipped(words)


def _built(kernel: Kernel) -> CppKernel:
    assert isinstance(kernel.given, CppKernel)
    return kernel.given


def _job(subject: Subject, kernel: Kernel) -> SanitizerJob:
    built = _built(kernel)
    schema = built.operator.specification.schema  # of what writes in place, not of its functional form
    samples, calls = [], []
    for sample in subject.samples:
        packing = tuple(sample.flattening.pack(list(range(len(sample.flat)))))
        samples.append(SampleArguments(sample.flat, sample.labels, packing))
        calls += list(_calls(subject, kernel, sample, len(samples) - 1))
    return SanitizerJob(
        subject.specification.name,
        tuple((each.name, each.kind.annotation()) for each in schema.arguments),
        tuple(each.name for each in schema.results),
        built.source.text,
        built.source.entry,
        built.source.folder,
        built.dtypes,
        tuple(samples),
        tuple(calls),
        schema.written,
        options=built.source.options,
    )


def _calls(subject: Subject, kernel: Kernel, sample: Sample, at: int) -> Iterator[SanitizedCall]:
    """The calls of a sample: in every dtype, then in every layout of every tensor."""
    seen: set[Any] = set()
    for dtype in (None, *ALWAYS_CHECKED, *LOW_PRECISION):
        if dtype is not None and not sample.takes(dtype):
            continue
        flat = sample.at(dtype, CPU)
        form = tuple(value.dtype if isinstance(value, Tensor) else None for value in flat)
        if form in seen:
            continue
        seen.add(form)
        words = f"{sample}" if dtype is None else f"{sample} in {dtype_name(dtype)}"
        yield from _accepted(subject, kernel, sample, flat, SanitizedCall(at, dtype, (), (), words))
        if at < subject.effort.sanitized_samples and sample.elements <= MOST_ELEMENTS:
            for argnum, layout in layouts_of(flat):
                if layout.name in BITS:
                    continue
                laid = list(flat)
                laid[argnum] = layout.of(flat[argnum].contiguous())
                odd = f"`{sample.labels[argnum]}` {layout.name}"
                call = SanitizedCall(at, dtype, ((argnum, layout),), (), words, odd)
                yield from _accepted(subject, kernel, sample, laid, call)


def _accepted(
    subject: Subject, kernel: Kernel, sample: Sample, flat: list[Any], call: SanitizedCall
) -> Iterator[SanitizedCall]:
    """The call with the result layouts; nothing if the kernel or the reference does not take it."""
    values, specification = sample.flattening.pack(flat), _built(kernel).operator.specification
    if isinstance(kernel.consider(values), Rejected) or unwritable(specification, values) is not None:
        return
    try:
        with torch.no_grad():
            results = subject.reference(sample, flat)
    except Exception as error:
        refuse_own(error)
        return  # not an input that the reference takes; other properties report it
    returned = results[len(results) - len(specification.schema.results) :]  # after the new values
    yield replace(call, forms=tuple(map(ResultLayout.of, returned)))


SANITIZED = Property(
    NAME, "kernels in C++ keep to their memory, and to what C++ defines", run, traits=("on-request",)
)


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
"""AddressSanitizer's kinds of accesses outside of an object."""

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
"""AddressSanitizer's kinds of errors that end a process, with descriptions."""

OWN = re.compile(r"<cpp of [^>]*>$")
"""Name of a source text in the process that is not a file."""


def without_duplicates(failures: Sequence[Failure]) -> list[Failure]:
    """Drop failures that another failure of the same line describes better.

    Two builds run, and one of them does not know the memory of its results. Both sanitizers detect a null
    pointer, an index outside of an array, and a division by zero.
    """
    outside = [each for each in failures if each.cause == "out-of-bounds"]
    named = {each.where for each in outside if each.input is not None}
    outside_lines = {each.where for each in outside}
    undefined = {each.where for each in failures if each.cause == "undefined"}
    also = {
        each.where: each.message
        for each in failures
        if each.cause == "undefined" and each.where in outside_lines
    }
    kept = []
    for failure in failures:
        if failure.cause == "out-of-bounds" and failure.input is None and failure.where in named:
            continue
        if failure.cause == "undefined" and failure.where in outside_lines:
            continue
        if failure.message.startswith(ENDS["FPE"]) and failure.where in undefined:
            continue
        if failure.cause == "out-of-bounds" and failure.where in also:
            failure = replace(failure, evidence={**failure.evidence, "also": also[failure.where]})
        kept.append(failure)
    return kept


@dataclass(frozen=True)
class KernelFindings:
    """Failures of one kernel, of which a call may take so many seconds."""

    job: SanitizerJob
    source: CppSource
    limit_s: float

    def of(self, run: CallOutcome) -> Iterator[Failure]:
        """Yield the failures of one call."""
        call = self.job.calls[run.call]
        for report in run.reports:
            yield self._reported(report, run, call)
        if run.late and not run.reports:
            yield self._late(call, self.source.where)
        elif run.status is not None and not run.reports:
            yield self._died(run.status, run.lines, call)
        for depends in run.depends:
            yield self._depending(depends, call)

    def _reported(self, report: SanitizerReport, run: CallOutcome, call: SanitizedCall) -> Failure:
        where, line = self._innermost_line(report.lines)
        if run.late and report.kind == "ABRT":
            return self._late(call, where, line)
        size = f" {report.size} bytes" if report.size else ""
        verb = {"READ": f"reads{size}", "WRITE": f"writes{size}"}.get(report.access, "uses memory")
        label, cause = None, "out-of-bounds"
        if report.kind == "undefined":
            cause, message = "undefined", f"its behaviour is undefined in C++: {report.text}"
        elif report.kind in GONE:
            message = f"it {verb} of {GONE[report.kind]}"
            message += f": `{report.variable}`" if report.variable else ""
        elif report.kind in OUTSIDE:
            label, beside = self._beside(report, run.spans)
            message = f"it {verb} {beside}"
        elif report.kind in MISUSED:
            message = MISUSED[report.kind]
        else:
            cause, message = "raises", f"{ENDS.get(report.kind, 'the process dies')}, and the process dies"
        return Failure(NAME, label, cause, message, where, self._evidence(call, line, report.text))

    def _beside(self, report: SanitizerReport, spans: Sequence[MemorySpan]) -> tuple[str | None, str]:
        """Return the argument or result nearest to an access, and a description of the access."""
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
            return None, f"outside of its memory, more than {REDZONE} bytes from any argument"
        _, far_, size, side = report.region
        what = {"after": f"{far_} bytes after the end of", "before": f"{far_} bytes before"}.get(
            side, "inside"
        )
        return None, f"outside of its memory: {what} a piece of {size} bytes"

    def _late(self, call: SanitizedCall, where: str, line: str = "") -> Failure:
        evidence = {**self._evidence(call, line), "limit": f"{self.limit_s:g} s"}
        message = f"a call did not finish within {self.limit_s:g} s" + "; it was in this line" * bool(line)
        return Failure(NAME, None, "raises", message, where, evidence)

    def _died(self, status: int, lines: Sequence[Line], call: SanitizedCall) -> Failure:
        """Make the failure of a crash without a report of the sanitizers."""
        where, line = self._innermost_line(lines)
        how, evidence = describe_exit(status)
        return Failure(NAME, None, "raises", how, where, {**self._evidence(call, line), **evidence})

    def _depending(self, found: Any, call: SanitizedCall) -> Failure:
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
        return Failure(NAME, name, "uninitialized", message, where, self._evidence(call, line))

    @cached_property
    def unset(self) -> list[tuple[int, str]]:
        """Lines that use a variable before it is set, by the compiler's warnings."""
        return unset_lines(self.source, self.job.operator, self.job.dtypes)

    def _innermost_line(self, lines: Sequence[Line]) -> tuple[str, str]:
        """Return location and text of the author's innermost line; the function's where it is unknown."""
        for line in lines:
            # In the process, lines of a text were counted from 1.
            if OWN.search(line.file):
                number = line.number + self.source.line - 1
                return f"{self.source.path}:{number}", self.source.quoted(number).strip()
        return self.source.where, ""

    def _evidence(self, call: SanitizedCall, line: str, tool: str = "") -> dict[str, Any]:
        by = tool if tool.startswith("AddressSanitizer") else ""
        told = {"sample": call.description, "layout": call.odd, "line": line, "found by": by}
        return {what: words for what, words in told.items() if words}
