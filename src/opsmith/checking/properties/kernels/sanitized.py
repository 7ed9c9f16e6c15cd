"""Kernels in C++ keep to their memory, and to what C++ defines, as the compiler's sanitizers see it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from opsmith.build.form import Form
from opsmith.checking.exceptions import refuse_own
from opsmith.checking.output.replay import check_again
from opsmith.checking.processes.sanitizer_parent import Job, Trial, Values, done
from opsmith.checking.processes.sanitizer_report import KernelFindings, apart
from opsmith.checking.properties.kernels.sizes import kernel_sizes
from opsmith.checking.property import Findings, Note, Property, Skipped
from opsmith.checking.report import Failure
from opsmith.checking.samples.cases import NARROW, WIDE, short
from opsmith.checking.samples.layouts import Layout, layouts_for
from opsmith.checking.samples.sample import Sample
from opsmith.checking.samples.variations import variations
from opsmith.checking.subject import CPU, Subject
from opsmith.core.kernels import Kernel, Rejected
from opsmith.kernels.cpp import CppKernel

NAME = "sanitized"

SAMPLES = {"quick": 2, "default": 8, "thorough": 1000}
"""So many samples are run in every layout."""
MOST_ELEMENTS = 20_000
"""Samples of more are run in the layout that they have alone."""
BITS = ("a negated view", "a conjugate view")
"""Layouts that a kernel never sees: torch undoes them before."""


def run(subject: Subject) -> Findings:
    """Run each kernel in C++ on every sample, in every dtype that it takes, and in every layout."""
    kernels = [each for each in subject.kernels_on(CPU) if isinstance(each.function, CppKernel)]
    if not kernels:
        yield Skipped("it has no kernel in C++")
        return
    # Nothing here calls the operator itself: what a faulty kernel would do in this process, nobody knows.
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
    if not job.trials:
        yield Skipped(f"the kernel at {kernel.where} takes none of the samples")
        return
    answer = done(job, subject.limit_s)
    findings = KernelFindings(NAME, job, built.source, subject.limit_s)
    failures = apart([failure for each in answer.runs for failure in findings.of(each)])
    yield from failures
    raised = [each.raised for each in answer.runs if each.raised is not None]
    what = f"of the {len(job.trials)} calls of the kernel at {kernel.where}"
    if answer.left and failures:
        yield Note(f"{answer.left} {what} were left out, after so many deaths")
    elif answer.left:
        yield Skipped(f"{answer.left} {what} were not made: their process ended, and nothing says why")
    if raised:
        words = f"{len(raised)} {what} raised: {raised[0].splitlines()[0]}"
        yield Note(words) if len(raised) < len(answer.runs) else Skipped(words)


def _job(subject: Subject, kernel: Kernel, built: CppKernel) -> Job:
    schema = subject.specification.schema
    samples, trials = [], []
    for sample in subject.samples:
        packing = tuple(sample.flattening.pack(list(range(len(sample.flat)))))
        samples.append(Values(sample.flat, sample.labels, packing))
        trials += list(_trials(subject, kernel, sample, len(samples) - 1))
    return Job(
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


def _trials(subject: Subject, kernel: Kernel, sample: Sample, at: int) -> Iterator[Trial]:
    """The calls that a sample makes: as it is, in every dtype, and then every layout of every tensor."""
    seen: set[Any] = set()
    for dtype in (None, *WIDE, *NARROW):
        if dtype is not None and not sample.takes(dtype):
            continue
        flat = sample.at(dtype)
        form = tuple(value.dtype if isinstance(value, Tensor) else None for value in flat)
        if form in seen:
            continue
        seen.add(form)
        words = f"{sample}" if dtype is None else f"{sample} in {short(dtype)}"
        yield from _trial(subject, kernel, sample, flat, Trial(at, dtype, (), (), words))
        if at < SAMPLES[subject.effort.name] and sample.elements <= MOST_ELEMENTS:
            for place, layout in _layouts(flat):
                laid = list(flat)
                laid[place] = layout.of(flat[place].contiguous())
                odd = f"`{sample.labels[place]}` {layout.name}"
                trial = Trial(at, dtype, ((place, layout),), (), words, odd)
                yield from _trial(subject, kernel, sample, laid, trial)


def _layouts(flat: Sequence[Any]) -> Iterator[tuple[int, Layout]]:
    for place, value in enumerate(flat):
        if isinstance(value, Tensor):
            yield from ((place, each) for each in layouts_for(value) if each.name not in BITS)


def _trial(
    subject: Subject, kernel: Kernel, sample: Sample, flat: list[Any], trial: Trial
) -> Iterator[Trial]:
    """The call with the forms of its results; nothing where the kernel or the reference does not take it."""
    if isinstance(kernel.consider(sample.flattening.pack(flat)), Rejected):
        return
    try:
        with torch.no_grad():
            results = subject.reference(sample, flat)
    except Exception as error:
        refuse_own(error)
        return  # what the reference does not take is no input; other properties tell
    forms = tuple(Form(tuple(each.shape), each.stride(), each.dtype) for each in results)
    yield replace(trial, forms=forms)


SANITIZED = Property(NAME, "kernels in C++ keep to their memory, and to what C++ defines", run)
