"""Kernels for a GPU on the CPU: the calls by which they run, and what is not verified of any kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.checking.exceptions import refuse_own
from opsmith.checking.numerics.answer import Computation
from opsmith.checking.property import Findings, Skipped, not_run, raised
from opsmith.checking.report import Outcome
from opsmith.checking.samples.cases import ALWAYS_CHECKED, LOW_PRECISION, Case, cases
from opsmith.checking.samples.memory_layouts import Layout, layouts_of, plain
from opsmith.checking.samples.sample import CPU, Sample
from opsmith.checking.subject import Subject, missing_device
from opsmith.core.kernels import Kernel, Rejected
from opsmith.core.specification import Specification
from opsmith.kernels.cpp.kernel import CppKernel
from opsmith.torch_library.writes import refuse_unwritable


def runs_in(kernel: Kernel) -> str:
    """Name of the property that runs a kernel: `forward`, or the one that runs it on the CPU instead."""
    language = getattr(kernel.given, "language", "")
    emulated = language in ("CUDA", "Triton") and missing_device(kernel.device) is not None
    return language.lower() if emulated else "forward"


def unverified_too(subject: Subject, kernel: Kernel, findings: Findings) -> Findings:
    """Yield the findings of a kernel for a GPU; where one is skipped and no GPU is here, it is unverified.

    Args:
        subject: The subject of the check.
        kernel: The kernel.
        findings: What its runs on the CPU find.
    """
    left = False
    for finding in findings:
        yield finding
        if isinstance(finding, Skipped):
            left = runs_in(kernel) == "forward"
            if not left:
                yield not_run(runs_in(kernel), kernel, finding.reason, finding.hint)
    if not left:
        subject.ran.kernels.add(kernel)


def unrun_kernels(found: Mapping[str, Outcome], subject: Subject) -> Findings:
    """Report each kernel that no property ran, with the reason; the error of one that does not compile.

    Args:
        found: The outcomes of all properties.
        subject: The subject of the check.
    """
    ran = {position for outcome in found.values() for position in outcome.kernels}
    for position, kernel in enumerate(subject.specification.kernels):
        if position in ran:
            continue
        outcome = found[runs_in(kernel)]
        try:
            reason, hint = _reason(outcome, subject, kernel)
        except errors.ToolchainError as error:
            reason, hint = f"{error.problem}: {error.got}", error.hint
        except errors.OpsmithError as error:
            yield raised("forward", subject, error, "compiled, though no sample needs it")
            continue
        yield not_run(outcome.property, kernel, reason, hint)


def _reason(outcome: Outcome, subject: Subject, kernel: Kernel) -> tuple[str, str | None]:
    """The reason why the property of this outcome did not run a kernel, and what to do about it."""
    way_out = f"check `{outcome.property}`, too" if outcome.left_out else ""
    if isinstance(kernel.given, CppKernel):
        kernel.given.load()
    if outcome.property == "forward":
        missing = missing_device(kernel.device)
        if missing is not None:
            return missing, None
        device = torch.device(kernel.device)
        calls = [sample.flattening.pack(sample.at(device=device)) for sample in subject.samples]
        none = [each.reason for each in map(kernel.consider, calls) if isinstance(each, Rejected)]
        if len(none) == len(calls):
            hint = " or ".join(filter(None, ["add one that it takes", way_out]))
            return f"it takes none of the samples ({'; '.join(sorted({*none}))})", hint
    return f"`{outcome.property}`, which runs it, is skipped: {outcome.reason}", way_out


def kernel_calls(
    subject: Subject, sample: Sample, dtypes: Collection[torch.dtype], *, in_layouts: bool
) -> Iterator[tuple[Case, list[Any]]]:
    """Yield the calls of a sample, each with its case and its flat arguments.

    Args:
        subject: The subject of the check.
        sample: The sample.
        dtypes: The dtypes of floating tensors that the kernel takes.
        in_layouts: True to try each tensor in other layouts too, as many as the effort allows.
    """
    sample = sample.on_cpu()
    right = _right(subject, sample, sample.at())
    for case in _cases(subject, sample, right, dtypes, None):
        yield case, case.flat()
    if not in_layouts:
        return
    for argnum, layout in islice(layouts_of([*map(plain, sample.flat)]), subject.effort.layouts):

        def laid(
            dtype: torch.dtype, device: torch.device, argnum: int = argnum, layout: Layout = layout
        ) -> list[Any]:
            flat = sample.at(dtype, device)
            flat[argnum] = layout.of(plain(flat[argnum]))
            return flat

        in_layout = right
        if layout.repeats:  # the numbers change
            try:
                in_layout = _right(subject, sample, laid(torch.float64, CPU))
            except Exception as error:
                refuse_own(error)
                continue  # numbers that the reference does not take
        for case in _cases(subject, sample, in_layout, dtypes, laid):
            yield case, laid(case.dtype, case.device)


def _right(subject: Subject, sample: Sample, flat: Sequence[Any]) -> Computation:
    reference = functools.partial(subject.reference, sample)
    return Computation.of(reference, flat, subject.generator(), has_truth=subject.has_truth)


def _cases(
    subject: Subject,
    sample: Sample,
    right: Computation,
    taken: Collection[torch.dtype],
    arguments: Callable[[torch.dtype, torch.device], list[Any]] | None,
) -> Iterator[Case]:
    """Yield the sample in each dtype that the kernel takes, on the CPU."""
    dtypes = tried_dtypes(sample, taken)
    if not dtypes:
        return
    alone = replace(
        subject,
        samples=tuple(each.on_cpu() for each in subject.samples),
        specification=replace(subject.specification, kernels=()),
    )
    for case in cases(alone, sample, right, dtypes, arguments):
        if isinstance(case, Case) and case.device == CPU:
            yield case


def tried_dtypes(sample: Sample, taken: Collection[torch.dtype]) -> tuple[torch.dtype, ...]:
    """Return the dtypes in which a sample is tried with a kernel that takes some dtypes."""
    if not sample.inexact:
        return ALWAYS_CHECKED
    return tuple(dtype for dtype in (*ALWAYS_CHECKED, *LOW_PRECISION) if dtype in taken)


def unwritable(specification: Specification, values: list[Any]) -> str | None:
    """Return the reason why an operator that writes in place refuses a call; None if it does not."""
    if specification.schema.written:
        try:
            refuse_unwritable(specification, values)
        except errors.MutationError as error:
            return error.problem
    return None


def copy_with_strides(tensor: Tensor) -> Tensor:
    """Copy a tensor with its strides, which a kernel that writes into it takes."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def calls_text(number: int) -> str:
    """Return a number of calls as reports show it."""
    return "1 call" if number == 1 else f"{number} calls"
