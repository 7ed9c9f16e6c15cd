"""Kernels in C++ under sanitizers: no access outside of their memory, no undefined behaviour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.build.symbols import Line
from opsmith.checking.exceptions import Raised, attempt
from opsmith.checking.output.replay import check_again
from opsmith.checking.processes.child import describe_exit
from opsmith.checking.processes.sanitizer_parent import (
    REDZONE,
    CallOutcome,
    MemorySpan,
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
from opsmith.torch_library.result_layouts import ResultLayout

NAME = "sanitized"

MOST_ELEMENTS = 20_000
"""Maximum number of elements of a sample that is run in other layouts."""
BITS = ("a negated view", "a conjugate view")
"""Layouts that torch resolves before it calls a kernel."""


def run(subject: Subject) -> Findings:
    """Run each kernel in C++ on every sample, in every dtype that it takes, and in every layout."""
    kernels = [each for each in subject.kernels_on(CPU) if isinstance(each.given, CppKernel)]
    if not kernels:
        yield Skipped("the operator has no kernel in C++")
        return
    # The operator is not called in this process, since a faulty kernel might damage it.
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
            again = check_again(subject, NAME)
            yield replace(finding, replay=again) if isinstance(finding, Failure) else finding


def _kernel(kernel: Kernel, job: SanitizerJob, runs: Sequence[CallOutcome], limit_s: float) -> Findings:
    """Yield the findings of one kernel's calls."""
    findings = KernelFindings(job, limit_s)
    failures = without_duplicates([failure for each in runs for failure in findings.of(each)])
    yield from failures
    left = len(job.calls) - (1 + runs[-1].call if runs else 0)
    raised = [each.raised for each in runs if each.raised is not None]
    what = f"of the {len(job.calls)} calls of the kernel at {kernel.where}"
    if left and failures:
        yield Note(f"{left} {what} were left out, because the process died too often")
    elif left:
        yield Skipped(f"{left} {what} were not made: their process ended without a report")
    if raised:
        words = f"{len(raised)} {what} raised: {raised[0].splitlines()[0]}"
        yield Note(words) if len(raised) < len(runs) else Skipped(words)


def _job(subject: Subject, kernel: Kernel) -> SanitizerJob:
    built = kernel.given
    assert isinstance(built, CppKernel)
    schema = built.operator.specification.schema  # the in-place operator's
    return SanitizerJob(
        subject.specification.name,
        tuple((each.name, each.kind.annotation()) for each in schema.arguments),
        tuple(each.name for each in schema.results),
        built.source,
        built.dtypes,
        tuple(call for at in range(len(subject.samples)) for call in _calls(subject, kernel, built, at)),
        schema.written,
    )


def _calls(subject: Subject, kernel: Kernel, built: CppKernel, at: int) -> Iterator[SanitizedCall]:
    """The calls of a sample that both kernel and reference take: in every dtype, then in every layout."""
    sample, specification = subject.samples[at], built.operator.specification
    packing = tuple(sample.flattening.pack([*range(len(sample.flat))]))
    many = at < subject.effort.sanitized_samples and sample.elements <= MOST_ELEMENTS
    seen: set[Any] = set()
    for dtype in (None, *ALWAYS_CHECKED, *LOW_PRECISION):
        flat = sample.at(dtype, CPU) if dtype is None or sample.takes(dtype) else None
        form = None if flat is None else tuple(getattr(value, "dtype", None) for value in flat)
        if flat is None or form in seen:
            continue
        seen.add(form)
        words = f"{sample}" if dtype is None else f"{sample} in {dtype_name(dtype)}"
        for laid in (None, *(layouts_of(flat) if many else ())):
            if laid is not None and laid[1].name in BITS:
                continue
            values, odd = [*flat], "" if laid is None else f"`{sample.labels[laid[0]]}` {laid[1].name}"
            if laid is not None:
                values[laid[0]] = laid[1].of(flat[laid[0]].contiguous())
            packed = sample.flattening.pack(values)
            if isinstance(kernel.consider(packed), Rejected) or unwritable(specification, packed) is not None:
                continue
            results = attempt(partial(_plainly, subject, sample, values))
            if not isinstance(results, Raised):  # else others report it
                returned = results[len(results) - len(specification.schema.results) :]  # after the new values
                forms = tuple(map(ResultLayout.of, returned))
                yield SanitizedCall(sample.flat, sample.labels, packing, dtype, laid, forms, words, odd)


@torch.no_grad()
def _plainly(subject: Subject, sample: Sample, flat: list[Any]) -> list[Tensor]:
    return subject.reference(sample, flat)


SANITIZED = Property(
    NAME,
    "kernels in C++ use no memory outside of their tensors, and do only what C++ defines",
    run,
    traits=("on-request",),
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
    "heap-use-after-free": "memory that was freed",
    "stack-use-after-scope": "a variable whose scope has ended",
    "stack-use-after-return": "a variable of a function that has returned",
}

MISUSED = {
    "double-free": "the kernel frees the same memory twice",
    "attempting": "the kernel frees memory that was not allocated, or is not its own",
    "alloc-dealloc-mismatch": "the kernel allocates and frees memory in ways that do not match, such as "
    "`new` and `free`",
    "memcpy-param-overlap": "the kernel copies memory onto itself with `memcpy`",
    "negative-size-param": "the kernel copies a negative number of bytes",
}

ENDS = {
    "stack-overflow": "the kernel needs more stack than is available",
    "FPE": "the kernel divides an integer by zero",
    "ABRT": "the kernel calls `abort`, or throws an exception that nothing catches",
    "ILL": "the kernel runs an instruction that this processor does not have",
}
"""Kinds of AddressSanitizer errors that end a process, with descriptions."""


def without_duplicates(failures: Sequence[Failure]) -> list[Failure]:
    """Drop failures that another failure of the same line describes better.

    Two builds run, and one of them does not know the bounds of its results. Both sanitizers detect a null
    pointer, an index outside of an array, and a division by zero.
    """
    outside = [each for each in failures if each.cause == "out-of-bounds"]
    undefined = {each.where: each.message for each in failures if each.cause == "undefined"}
    named = {each.where for each in outside if each.input is not None}
    outside_lines = {each.where for each in outside}
    kept = []
    for failure in failures:
        is_outside = failure.cause == "out-of-bounds"
        twice = is_outside and failure.input is None and failure.where in named
        twice |= failure.cause == "undefined" and failure.where in outside_lines
        twice |= failure.message.startswith(ENDS["FPE"]) and failure.where in undefined
        if is_outside and failure.where in undefined:
            failure = replace(failure, evidence={**failure.evidence, "also": undefined[failure.where]})
        kept += [] if twice else [failure]
    return kept


@dataclass(frozen=True)
class KernelFindings:
    """Failures of one kernel, with the time limit of a call in seconds."""

    job: SanitizerJob
    limit_s: float

    def of(self, run: CallOutcome) -> Iterator[Failure]:
        """Yield the failures of one call."""
        call = self.job.calls[run.call]
        for report in run.reports:
            yield self._reported(report, run, call)
        if run.late and not run.reports:
            yield self._late(call, (self.job.source.where, ""))
        elif run.status is not None and not run.reports:  # a crash without a sanitizer's report
            how, evidence = describe_exit(run.status)
            yield self._failure(call, None, "raises", how, self._innermost_line(run.lines), **evidence)
        for depends in run.depends:
            yield self._depending(depends, call)

    def _reported(self, report: SanitizerReport, run: CallOutcome, call: SanitizedCall) -> Failure:
        at = self._innermost_line(report.lines)
        if run.late and report.kind == "ABRT":
            return self._late(call, at)
        size = f" {report.size} bytes" if report.size else ""
        verb = {"READ": f"reads{size}", "WRITE": f"writes{size}"}.get(report.access, "uses memory")
        label, cause = None, "out-of-bounds"
        if report.kind == "undefined":
            cause, message = "undefined", f"the kernel's behaviour is undefined in C++: {report.text}"
        elif report.kind in GONE:
            message = f"the kernel {verb} of {GONE[report.kind]}"
            message += f": `{report.variable}`" if report.variable else ""
        elif report.kind in OUTSIDE:
            label, beside = self._beside(report, run.spans)
            message = f"the kernel {verb} {beside}"
        elif report.kind in MISUSED:
            message = MISUSED[report.kind]
        else:
            cause, message = "raises", f"{ENDS.get(report.kind, 'the process dies')}, and the process dies"
        by = "" if report.kind == "undefined" else report.text
        return self._failure(call, label, cause, message, at, **{"found by": by})

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
                past, before = address - span.start - span.size, span.start - address
                far = f"{past} bytes after its end" if past > 0 else f"{before} bytes before it"
                far = far if past else "just after its end"
                return span.label, f"outside of `{span.label}`, which has {span.size} bytes: {far}"
        if report.kind in ("SEGV", "BUS"):
            null = address < 4096
            return None, "through a null pointer" if null else "at an address without memory of this process"
        if report.region is None:
            return None, f"outside of its memory, more than {REDZONE} bytes from any argument"
        _, far_, size, side = report.region
        words = {"after": f"{far_} bytes after the end of", "before": f"{far_} bytes before"}
        return None, f"outside of its memory: {words.get(side, 'inside')} a block of {size} bytes"

    def _late(self, call: SanitizedCall, at: tuple[str, str]) -> Failure:
        limit = f"{self.limit_s:g} s"
        message = f"a call did not finish within {limit}" + "; this line was running" * bool(at[1])
        return self._failure(call, None, "raises", message, at, limit=limit)

    def _depending(self, found: Any, call: SanitizedCall) -> Failure:
        name = found["result"]
        count = f"{found['count']} of {found['of']} elements, the first at {found['first']}"
        if found["unwritten"]:
            message = (
                f"the kernel does not write all of `{name}`: {count}, still have the old contents of the "
                "memory"
            )
        else:
            message = (
                f"`{name}` depends on a variable that the kernel reads before the first write: "
                f"{count}, change with the old contents of the variable"
            )
        lines: list[Line] = []
        if not found["unwritten"] and self.unset:
            number, words = self.unset[0]
            lines = [Line("", self.job.source.path, number)]
            message += f"; the compiler warns: {words}"
        return self._failure(call, name, "uninitialized", message, self._innermost_line(lines))

    @cached_property
    def unset(self) -> list[tuple[int, str]]:
        """Lines that use a variable before it is set, by the compiler's warnings."""
        return unset_lines(self.job.source, self.job.operator, self.job.dtypes)

    def _innermost_line(self, lines: Sequence[Line]) -> tuple[str, str]:
        """Return location and text of the author's innermost line; of the function if the line is unknown."""
        source = self.job.source
        own = next((line.number for line in lines if line.is_of(source.path)), None)
        return (source.where, "") if own is None else (f"{source.path}:{own}", source.quoted(own).strip())

    def _failure(
        self,
        call: SanitizedCall,
        label: str | None,
        cause: str,
        message: str,
        at: tuple[str, str],
        **more: Any,
    ) -> Failure:
        told = {"sample": call.description, "layout": call.odd, "line": at[1], **more}
        evidence = {what: words for what, words in told.items() if words != ""}
        return Failure(NAME, label, cause, message, at[0], evidence)
