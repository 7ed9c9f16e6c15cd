"""Calls by which kernels for a GPU are run on the CPU: samples in every dtype and layout."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.checking.exceptions import refuse_own
from opsmith.checking.numerics.tolerance import MeasuredFunction
from opsmith.checking.property import Findings, Skipped, not_run
from opsmith.checking.samples.cases import ALWAYS_CHECKED, LOW_PRECISION, Case, cases
from opsmith.checking.samples.memory_layouts import Layout, layouts_of, plain
from opsmith.checking.samples.sample import CPU, Sample
from opsmith.checking.subject import Subject, missing_device
from opsmith.core.kernels import Kernel
from opsmith.core.specification import Specification
from opsmith.torch_library.writes import refuse_unwritable


def unverified_too(property: str, kernel: Kernel, findings: Findings) -> Findings:
    """Yield the findings of a kernel for a GPU; where one is skipped and no GPU is here, it is unverified.

    Args:
        property: Name of the property.
        kernel: The kernel.
        findings: What its runs on the CPU find.
    """
    for finding in findings:
        yield finding
        if isinstance(finding, Skipped) and missing_device(kernel.device) is not None:
            yield not_run(property, kernel, finding.reason, f"the kernel is not verified: {finding}")


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
    measure = _measure(subject, sample, sample.at())
    for case in _cases(subject, sample, measure, dtypes, None):
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

        in_layout = measure
        if layout.repeats:  # the numbers change
            try:
                in_layout = _measure(subject, sample, laid(torch.float64, CPU))
            except Exception as error:
                refuse_own(error)
                continue  # numbers that the reference does not take
        for case in _cases(subject, sample, in_layout, dtypes, laid):
            yield case, laid(case.dtype, case.device)


def _measure(subject: Subject, sample: Sample, flat: Sequence[Any]) -> MeasuredFunction:
    reference = functools.partial(subject.reference, sample)
    return MeasuredFunction.of(reference, flat, subject.generator(), has_truth=subject.has_truth)


def _cases(
    subject: Subject,
    sample: Sample,
    measure: MeasuredFunction,
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
    for case in cases(alone, sample, measure, dtypes, arguments):
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
