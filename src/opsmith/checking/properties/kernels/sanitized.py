"""Kernels in C++ under sanitizers: no access outside of their memory, no undefined behaviour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import refuse_own
from opsmith.checking.output.replay import check_again
from opsmith.checking.processes.sanitizer_parent import SampleArguments, SanitizedCall, SanitizerJob, run_job
from opsmith.checking.processes.sanitizer_report import KernelFindings, without_duplicates
from opsmith.checking.properties.kernels.sizes import kernel_sizes
from opsmith.checking.property import Findings, Note, Property, Skipped
from opsmith.checking.report import Failure
from opsmith.checking.samples.cases import ALWAYS_CHECKED, LOW_PRECISION, dtype_name
from opsmith.checking.samples.layouts import Layout, layouts_for
from opsmith.checking.samples.sample import Sample
from opsmith.checking.samples.variations import variations
from opsmith.checking.subject import CPU, Subject
from opsmith.core.kernels import Kernel, Rejected
from opsmith.kernels.common.result_layout import ResultLayout
from opsmith.kernels.cpp.kernel import CppKernel

NAME = "sanitized"

MOST_ELEMENTS = 20_000
"""Largest number of elements of a sample that is run in other layouts."""
BITS = ("a negated view", "a conjugate view")
"""Layouts that torch resolves before it calls a kernel."""


def run(subject: Subject) -> Findings:
    """Run each kernel in C++ on every sample, in every dtype that it takes, and in every layout."""
    kernels = [each for each in subject.kernels_on(CPU) if isinstance(each.function, CppKernel)]
    if not kernels:
        yield Skipped("it has no kernel in C++")
        return
    # The operator is not called in this process, which a faulty kernel might damage.
    safe = subject.by_reference()
    safe = replace(safe, samples=(*safe.samples, *variations(safe).samples))
    safe = replace(safe, samples=(*safe.samples, *kernel_sizes(safe)))
    for kernel in kernels:
        for finding in _kernel(safe, kernel):
            if isinstance(finding, Failure):
                finding = replace(finding, replay=check_again(subject, NAME))
            yield finding


def _kernel(subject: Subject, kernel: Kernel) -> Findings:
    built = kernel.function
    assert isinstance(built, CppKernel)
    job = _job(subject, kernel, built)
    if not job.calls:
        yield Skipped(f"the kernel at {kernel.where} takes none of the samples")
        return
    answer = run_job(job, subject.limit_s)
    findings = KernelFindings(NAME, job, built.source, subject.limit_s)
    failures = without_duplicates([failure for each in answer.runs for failure in findings.of(each)])
    yield from failures
    raised = [each.raised for each in answer.runs if each.raised is not None]
    what = f"of the {len(job.calls)} calls of the kernel at {kernel.where}"
    if answer.left and failures:
        yield Note(f"{answer.left} {what} were left out, after so many deaths")
    elif answer.left:
        yield Skipped(f"{answer.left} {what} were not made: their process ended, and nothing says why")
    if raised:
        words = f"{len(raised)} {what} raised: {raised[0].splitlines()[0]}"
        yield Note(words) if len(raised) < len(answer.runs) else Skipped(words)


def _job(subject: Subject, kernel: Kernel, built: CppKernel) -> SanitizerJob:
    schema = subject.specification.schema
    samples, trials = [], []
    for sample in subject.samples:
        packing = tuple(sample.flattening.pack(list(range(len(sample.flat)))))
        samples.append(SampleArguments(sample.flat, sample.labels, packing))
        trials += list(_trials(subject, kernel, sample, len(samples) - 1))
    return SanitizerJob(
        subject.specification.name,
        tuple((each.name, each.kind.annotation()) for each in schema.arguments),
        tuple(each.name for each in schema.results),
        built.text,
        built.entry,
        built.source.folder,
        built.dtypes,
        tuple(samples),
        tuple(trials),
    )


def _trials(subject: Subject, kernel: Kernel, sample: Sample, at: int) -> Iterator[SanitizedCall]:
    """The calls of a sample: in every dtype, then in every layout of every tensor."""
    seen: set[Any] = set()
    for dtype in (None, *ALWAYS_CHECKED, *LOW_PRECISION):
        if dtype is not None and not sample.takes(dtype):
            continue
        flat = sample.at(dtype)
        form = tuple(value.dtype if isinstance(value, Tensor) else None for value in flat)
        if form in seen:
            continue
        seen.add(form)
        words = f"{sample}" if dtype is None else f"{sample} in {dtype_name(dtype)}"
        yield from _trial(subject, kernel, sample, flat, SanitizedCall(at, dtype, (), (), words))
        if at < subject.effort.sanitized_samples and sample.elements <= MOST_ELEMENTS:
            for argnum, layout in _layouts(flat):
                laid = list(flat)
                laid[argnum] = layout.of(flat[argnum].contiguous())
                odd = f"`{sample.labels[argnum]}` {layout.name}"
                trial = SanitizedCall(at, dtype, ((argnum, layout),), (), words, odd)
                yield from _trial(subject, kernel, sample, laid, trial)


def _layouts(flat: Sequence[Any]) -> Iterator[tuple[int, Layout]]:
    for argnum, value in enumerate(flat):
        if isinstance(value, Tensor):
            yield from ((argnum, each) for each in layouts_for(value) if each.name not in BITS)


def _trial(
    subject: Subject, kernel: Kernel, sample: Sample, flat: list[Any], trial: SanitizedCall
) -> Iterator[SanitizedCall]:
    """The call with the result layouts; nothing if the kernel or the reference does not take it."""
    if isinstance(kernel.consider(sample.flattening.pack(flat)), Rejected):
        return
    try:
        with torch.no_grad():
            results = subject.reference(sample, flat)
    except Exception as error:
        refuse_own(error)
        return  # not an input that the reference takes; other properties report it
    forms = tuple(ResultLayout(tuple(each.shape), each.stride(), each.dtype) for each in results)
    yield replace(trial, forms=forms)


SANITIZED = Property(
    NAME, "kernels in C++ keep to their memory, and to what C++ defines", run, on_request=True
)
