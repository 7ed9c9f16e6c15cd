"""Kernels in Triton, run by Triton's interpreter on the CPU, in every dtype and layout."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.checking.exceptions import refuse_own
from opsmith.checking.numerics.compare import SavedBits
from opsmith.checking.properties.kernels.calls_on_cpu import (
    calls_text,
    copy_with_strides,
    kernel_calls,
    tried_dtypes,
    unverified_too,
    unwritable,
)
from opsmith.checking.properties.kernels.sizes import forms, kernel_sizes
from opsmith.checking.properties.numeric.forward import compare_results
from opsmith.checking.property import Findings, Note, Property, Skipped, each_sample, not_run, raised
from opsmith.checking.report import Failure
from opsmith.checking.samples.cases import Case, dtype_name
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.core.functional_form import on_copies
from opsmith.core.kernels import Kernel
from opsmith.core.tensors import resolved
from opsmith.kernels.triton.interpreter import missing_interpreter, out_of_bounds
from opsmith.kernels.triton.kernel import TritonKernel

NAME = "triton"
TRIALS = 3
"""Calls that the interpreter may fail to run before a kernel is given up."""


@dataclass
class Interpreted:
    """A kernel in Triton, run in the interpreter within the limits of the effort.

    Args:
        kernel: The kernel.
        left: Number of programs that may still run.

    Attributes:
        ran: Number of calls in each dtype.
        left_out: Number of calls left out, since they have too many programs, or none was left.
        unfit: Reasons why the kernel refused some of them.
        limits: Reasons why the interpreter could not run some of them, with their number.
    """

    kernel: TritonKernel
    left: int
    ran: Counter[torch.dtype] = field(default_factory=Counter)
    left_out: int = 0
    unfit: dict[str, None] = field(default_factory=dict)
    limits: Counter[str] = field(default_factory=Counter)

    def interpret(self, case: Case, flat: list[Any]) -> Findings:
        """Run one call, and compare its results with the truth."""
        subject, sample = case.subject, case.sample
        values = resolved(sample.flattening.pack(flat))
        if self.limits.total() >= TRIALS and not self.ran:
            return
        misfit = self.kernel.value_refusal(values) or unwritable(self.kernel.operator.specification, values)
        if misfit is not None:
            self.unfit[misfit] = None
            return
        before = [(label, SavedBits.of(each)) for label, each in _tensors(sample, values)]
        try:
            programs = self.kernel.programs(values)
            if programs > min(self.left, subject.effort.call_programs):
                self.left_out += 1
                return
            self.left -= programs
            results = subject.kernel(sample, sample.flattening.flatten(values), self._function())
        except errors.ToolchainError as error:
            self.limits[f"{error.problem}: {error.got} at {error.where}"] += 1
            return
        except Exception as error:
            self.ran[case.dtype] += 1
            refuse_own(error)
            failure = raised(NAME, subject, error, str(case))
            yield failure if out_of_bounds(error) is None else replace(failure, cause="out-of-bounds")
            return
        self.ran[case.dtype] += 1
        for label, kept in before:
            written = kept.written()
            if written is not None:
                message = f"the kernel in Triton writes into `{label}`: {written}"
                yield Failure(NAME, label, "mutates-input", message, self.kernel.where, {"sample": str(case)})
        every = range(len(subject.every(sample)))
        what = "the kernel in Triton, interpreted,"
        yield from compare_results(NAME, case, results, every, what, self.kernel.where, lambda position: None)

    def _function(self) -> Any:
        schema = self.kernel.operator.specification.schema

        @functools.wraps(self.kernel.source.function)  # for its location in messages
        def run(*args: Any, **kwargs: Any) -> Any:
            return self.kernel.interpreted(*args, **kwargs)

        return on_copies(run, schema, copied=copy_with_strides) if schema.written else run

    def summary(self) -> Findings:
        """Yield notes on the calls that ran, or a reason or a failure if some or all did not."""
        if self.limits and not self.ran:
            yield Skipped("; ".join(self.limits))
            return
        if not self.ran:
            none = f"it takes none of the samples ({self._why()})"
            yield not_run(NAME, Kernel("cuda", self.kernel), none, "add one that it takes")
            return
        dtypes = ", ".join(dtype_name(dtype) for dtype in self.ran)
        calls = self.ran.total()
        wider = ", bfloat16 computed in float32" if torch.bfloat16 in self.ran else ""
        yield Note(f"interpreted on the CPU, not on a GPU: {calls} calls in {dtypes}{wider}")
        if self.left_out:
            yield Note(f"{self.left_out} calls were not interpreted: they have too many programs for a check")
        if self.kernel.source.configs[1:]:
            yield Note("of the configurations of `triton.autotune` the first alone was interpreted")
        if self.limits:  # what is unverified in part must not pass
            given_up = [
                f"{calls_text(times)} not interpreted: {limit}" for limit, times in self.limits.items()
            ]
            yield Skipped("; ".join(given_up))

    def _why(self) -> str:
        too_many = ["they have too many programs for a check"] if self.left_out else []
        return "; ".join([*sorted(self.unfit), *too_many])


def run(subject: Subject) -> Findings:
    """Interpret every kernel in Triton on every sample, in every dtype and layout that it takes."""
    kernels = [each for each in subject.specification.kernels if isinstance(each.given, TritonKernel)]
    if not kernels:
        yield Skipped("it has no kernel in Triton")
        return
    missing = missing_interpreter()
    if missing is not None:
        for kernel in kernels:
            yield from unverified_too(subject, kernel, iter([Skipped(missing)]))
        return
    on_cpu = tuple(Kernel("cpu", each.function) for each in kernels)
    with_kernels = replace(subject, specification=replace(subject.specification, kernels=on_cpu))
    more = replace(subject, samples=(*subject.samples, *kernel_sizes(with_kernels)))
    laid = forms(subject)
    for kernel in kernels:
        assert isinstance(kernel.given, TritonKernel)
        interpreted = Interpreted(kernel.given, subject.effort.programs)

        def check_sample(
            subject: Subject, sample: Sample, interpreted: Interpreted = interpreted
        ) -> Findings:
            yield from _sample(subject, sample, interpreted, in_layouts=sample in laid)

        yield from each_sample(NAME, check_sample, more)
        yield from unverified_too(subject, kernel, interpreted.summary())


def _sample(subject: Subject, sample: Sample, interpreted: Interpreted, *, in_layouts: bool) -> Findings:
    taken = interpreted.kernel.dtypes
    if not tried_dtypes(sample, taken):
        interpreted.unfit[f"it takes {', '.join(sorted(map(dtype_name, taken)))}"] = None
        return
    for case, flat in kernel_calls(subject, sample, taken, in_layouts=in_layouts):
        yield from interpreted.interpret(case, flat)


def _tensors(sample: Sample, values: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    for label, value in zip(sample.labels, sample.flattening.flatten(list(values)), strict=True):
        if isinstance(value, Tensor):
            yield label, value


TRITON = Property(
    NAME,
    "kernels in Triton give what the reference gives, interpreted on the CPU, in every dtype and layout",
    run,
    varied=True,
)
