"""Kernels in CUDA C++, run on the CPU with every access to memory checked, in every dtype and layout."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from opsmith import errors
from opsmith.checking.exceptions import refuse_own
from opsmith.checking.output.replay import check_again
from opsmith.checking.processes.fork import announce
from opsmith.checking.properties.kernels.calls_on_cpu import (
    calls_text,
    copy_with_strides,
    kernel_calls,
    unverified_too,
    unwritable,
)
from opsmith.checking.properties.kernels.equal_indices import keeps_one
from opsmith.checking.properties.kernels.sizes import forms, kernel_sizes
from opsmith.checking.properties.numeric.forward import compare_results
from opsmith.checking.property import Findings, Note, Property, Skipped, each_sample, not_run, raised
from opsmith.checking.report import Failure
from opsmith.checking.samples.cases import ALWAYS_CHECKED, LOW_PRECISION, Case, dtype_name
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.core.call_arguments import tensors_in
from opsmith.core.functional_form import copies_of_written, on_copies
from opsmith.core.kernels import BuiltKernel, Kernel
from opsmith.core.tensors import resolved

if TYPE_CHECKING:
    from opsmith.kernels.cuda.emulation.call import EmulatedCall, KernelEmulation
    from opsmith.kernels.cuda.emulation.launch import EmulatedRun
    from opsmith.kernels.cuda.emulation.messages import EmulationFinding

NAME = "cuda"
TOGETHER = 24
"""Calls whose launches run in one child process."""


@dataclass(frozen=True)
class _Call:
    """Call of a kernel.

    Args:
        case: The sample, dtype and truth.
        given: Argument values.
        values: The same, with copies of those that the kernel writes into.
        emulated: The call on the CPU.
    """

    case: Case
    given: list[Any]
    values: list[Any]
    emulated: EmulatedCall


_Outcome = tuple[str, "EmulatedRun | None", "list[EmulationFinding]"]
"""Order of the threads, the run of a call in it, and its findings."""


@dataclass
class Emulated:
    """A kernel in CUDA C++, run on the CPU within the limits of the effort.

    Args:
        emulation: The emulation of the kernel.
        subject: The subject of the check.
        left: Number of threads that may still run.

    Attributes:
        ran: Number of calls that were launched and judged, in each dtype.
        unordered: Number of calls with races alone that distinct indices, as the samples have, exclude.
        empty: Number of calls without a launch: nothing of the kernel runs.
        left_out: Number of calls left out, since they have too many threads, or none was left.
        unfit: Reasons why the kernel refused some of them.
        untried: Number of calls that were not run, since those before them were given up.
        limits: Reasons why some were given up on the CPU, with the number of calls.
        doubtful: What is legal and doubtful.
        reported: Findings that were reported, by cause and place.
    """

    emulation: KernelEmulation
    subject: Subject
    left: int
    ran: Counter[torch.dtype] = field(default_factory=Counter)
    unordered: int = 0
    empty: int = 0
    untried: int = 0
    left_out: int = 0
    unfit: dict[str, None] = field(default_factory=dict)
    limits: Counter[str] = field(default_factory=Counter)
    doubtful: dict[str, None] = field(default_factory=dict)
    reported: set[tuple[str, ...]] = field(default_factory=set)

    @property
    def where(self) -> str:
        """`file:line` of the kernel."""
        return self.emulation.kernel.where

    def run(self, calls: Sequence[tuple[Case, list[Any]]]) -> Findings:
        """Run the calls that the kernel takes, and compare their results with the truth."""
        try:
            self.emulation.build([values for _, values in calls])
        except (errors.NotEmulatedError, errors.ToolchainError, errors.CacheError) as error:
            yield _skipped(error)
            return
        except errors.OpsmithError as error:
            yield raised(NAME, self.subject, error, "compiled for the CPU")
            return
        accepted: list[_Call] = []
        for case, values in calls:
            yield from self._prepare(case, values, accepted)
        # The first one runs alone: to give up a call takes long.
        for at in [0, *range(1, len(accepted), TOGETHER)] if accepted else []:
            together = accepted[at : at + (TOGETHER if at else 1)]
            if self.limits and not self.ran:
                self.untried += len(together)
                continue
            try:
                yield from self._launch(together)
            except errors.ToolchainError as error:
                yield _skipped(error)
                return
        yield from self._summary()

    def _prepare(self, case: Case, given: list[Any], accepted: list[_Call]) -> Findings:
        """Add a call to the accepted ones, if the kernel takes it and the effort allows it."""
        specification = self.emulation.kernel.operator.specification
        misfit = unwritable(specification, given)
        if misfit is not None:
            self.unfit[misfit] = None
            return
        values = copies_of_written(specification.schema, given, copy_with_strides)
        try:
            call = self.emulation.prepare(values)
        except Exception as error:
            refuse_own(error)
            yield raised(NAME, self.subject, error, str(case))
            return
        if isinstance(call, str):
            self.unfit[call] = None
            return
        threads = call.threads * len(self._orders)
        if threads > min(self.left, self.subject.effort.call_threads):
            self.left_out += 1
            return
        self.left -= threads
        accepted.append(_Call(case, given, values, call))

    @property
    def _orders(self) -> tuple[str, ...]:
        from opsmith.kernels.cuda.emulation.launch import ORDERS

        return ORDERS if self.subject.effort.exhaustive else ORDERS[:2]

    def _launch(self, calls: Sequence[_Call]) -> Findings:
        from opsmith.kernels.cuda.emulation.launch import Order

        runs: list[tuple[_Call, str, EmulatedRun]] = []
        for call in calls:
            for order in self._orders:
                run = call.emulated.new_run(Order(order, self.subject.seed))
                if run is not None:
                    runs.append((call, order, run))
        announce(functools.partial(str, calls[0].case))
        found = self.emulation.run([run for _, _, run in runs])
        outcomes: dict[int, list[_Outcome]] = {id(call): [] for call in calls}
        for (call, order, run), findings in zip(runs, found, strict=True):
            outcomes[id(call)].append((order, run, findings))
        for call in calls:
            yield from self._compare(call, outcomes[id(call)])

    def _compare(self, call: _Call, outcomes: Sequence[_Outcome]) -> Findings:
        """Yield the findings of a call, or compare its results where there are none."""
        from opsmith.kernels.cuda.emulation.messages import NOTE, SKIPPED

        if self._only_races(call, outcomes):
            self.unordered += 1
            return
        failed = False
        limits: dict[str, None] = {}
        for order, _, findings in outcomes:
            for each in findings:
                if each.cause == NOTE:
                    self.doubtful[f"{each.message}, at {each.where}: {each.hint}"] = None
                elif each.cause == SKIPPED:
                    limits[f"{each.message}, at {each.where}"] = None
                else:
                    failed = True
                    yield from self._reported(call, order, each)
        self.limits.update([*limits])
        if not outcomes:
            self.empty += 1
        elif failed or not limits:
            self.ran[call.case.dtype] += 1
        if failed or limits:
            return
        every = range(len(self.subject.every(call.case.sample)))
        nothing: list[_Outcome] = [("forward", None, [])]  # a call without a launch
        for order, run, _ in outcomes or nothing:
            results = self.subject.kernel(
                call.case.sample,
                call.case.sample.flattening.flatten(call.given),
                self._computed(call, run),
            )
            failures = list(
                compare_results(
                    NAME,
                    call.case,
                    results,
                    every,
                    f"the kernel in CUDA C++, run on the CPU with its threads in {order} order,",
                    self.where,
                    lambda position: None,
                )
            )
            yield from failures
            if failures:
                return

    def _only_races(self, call: _Call, outcomes: Sequence[_Outcome]) -> bool:
        """Return True if all findings are races that distinct indices, as the samples have, exclude."""
        from opsmith.kernels.cuda.emulation.messages import NOTE

        causes = {each.cause for _, _, findings in outcomes for each in findings} - {NOTE}
        sample = call.case.sample
        return causes == {"race"} and keeps_one(self.subject, sample, sample.flattening.flatten(call.given))

    def _computed(self, call: _Call, run: EmulatedRun | None) -> Any:
        """Return a kernel that gives what a run has computed."""
        kernel = self.emulation.kernel
        schema = kernel.operator.specification.schema

        @functools.wraps(kernel.operator.specification.reference)  # for its location in messages
        def computed(*args: Any, **kwargs: Any) -> Any:
            returned = call.emulated.finish(kernel, run)
            given = schema.call_values(args, kwargs)
            for argument, value, new in zip(schema.arguments, given, call.values, strict=True):
                if argument.alias:
                    for tensor, written in zip(tensors_in([value]), tensors_in([new]), strict=True):
                        tensor.copy_(written)
            return returned

        return on_copies(computed, schema, copied=copy_with_strides) if schema.written else computed

    def _reported(self, call: _Call, order: str, found: EmulationFinding) -> Iterator[Failure]:
        key = (found.cause, *sorted((found.where, found.other_where)), found.label or "")
        if key in self.reported:
            return
        self.reported.add(key)
        evidence: dict[str, Any] = {"sample": str(call.case), "order of threads": order}
        if found.line:
            evidence["line"] = found.line
        if found.other_line:
            evidence["other line"] = f"{found.other_where}: {found.other_line}"
        if found.count > 1:
            evidence["times"] = found.count
        message = f"{found.message}; {found.hint}" if found.hint else found.message
        again = check_again(self.subject, NAME)
        yield Failure(NAME, found.label, found.cause, message, found.where, evidence, again)

    def _summary(self) -> Findings:
        """Yield notes on the calls that ran, or a reason or a failure if some or all did not."""
        from opsmith.kernels.cuda.emulation.unseen import unseen_faults

        ran = f"{calls_text(self.ran.total())} in {', '.join(map(dtype_name, self.ran))}"
        too_large = f"{calls_text(self.left_out)} not run: too many threads for a check"
        if self.ran:
            yield Note(f"run on the CPU, not on a GPU: {ran}")
            if self.left_out:
                yield Note(too_large)
            if self.unordered:
                yield Note(
                    f"{calls_text(self.unordered)} not judged: they have equal indices, of which the "
                    "reference keeps one value, and the samples have distinct ones"
                )
        elif self.left_out and not self.limits:
            yield Skipped(too_large)
            return
        if self.limits:  # what is unverified in part must not pass
            given_up = [f"{calls_text(times)} given up: {limit}" for limit, times in self.limits.items()]
            if self.untried:
                given_up.append(f"{calls_text(self.untried)} behind not run")
            yield Skipped("; ".join(given_up))
        elif not self.ran:
            reasons = sorted(self.unfit)
            if self.empty:
                reasons.append(f"{calls_text(self.empty)} without a launch")
            reasons = reasons or [f"it takes {', '.join(map(dtype_name, self.emulation.kernel.dtypes))}"]
            none = f"it takes none of the samples ({'; '.join(reasons)})"
            yield not_run(NAME, Kernel("cuda", self.emulation.kernel), none, "add one that it takes")
            return
        unseen = unseen_faults(self.emulation.kernel.source)
        if unseen:
            yield Skipped(unseen)
        yield from map(Note, self.doubtful)


def _skipped(error: errors.OpsmithError) -> Skipped:
    return Skipped(f"{error.problem}: {error.got}", error.hint or "")


def run(subject: Subject) -> Findings:
    """Run every kernel in CUDA C++ on the CPU on every sample, in every dtype and layout that it takes."""
    kernels = [
        each
        for each in subject.specification.kernels
        if isinstance(each.given, BuiltKernel) and each.given.language == "CUDA"
    ]
    if not kernels:
        yield Skipped("it has no kernel in CUDA C++")
        return
    from opsmith.kernels.cuda.emulation.call import KernelEmulation  # few operators need it
    from opsmith.kernels.cuda.kernel import CudaKernel

    on_cpu = tuple(Kernel("cpu", each.function) for each in kernels)
    with_kernels = replace(subject, specification=replace(subject.specification, kernels=on_cpu))
    more = replace(subject, samples=(*subject.samples, *kernel_sizes(with_kernels)))
    laid = forms(subject)
    for kernel in {each.given: each for each in kernels}.values():
        given = kernel.given
        assert isinstance(given, CudaKernel)
        calls: list[tuple[Case, list[Any]]] = []
        taken = given.dtypes or (*ALWAYS_CHECKED, *LOW_PRECISION)

        def gather(subject: Subject, sample: Sample, taken: Any = taken, calls: Any = calls) -> Findings:
            for case, flat in kernel_calls(subject, sample, taken, in_layouts=sample in laid):
                calls.append((case, resolved(sample.flattening.pack(flat))))
            return iter(())

        yield from each_sample(NAME, gather, more)
        emulated = Emulated(KernelEmulation(given), subject, subject.effort.threads)
        yield from unverified_too(subject, kernel, emulated.run(calls))


CUDA = Property(
    NAME,
    "kernels in CUDA C++ give what the reference gives, without races and within their memory, on the CPU",
    run,
    varied=True,
)
