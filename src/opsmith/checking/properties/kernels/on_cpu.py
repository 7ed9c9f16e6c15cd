"""GPU kernels, run on the CPU: a property for each language that can run its kernels there.

Each kernel runs on every sample, in every dtype and layout that it takes, and must give the reference's
results.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.checking.causes import CAUSES
from opsmith.checking.exceptions import Raised, attempt
from opsmith.checking.output.replay import check_again
from opsmith.checking.processes.fork import announce
from opsmith.checking.properties.kernels.sizes import forms, kernel_sizes
from opsmith.checking.properties.kernels.unverified import unverified_too, unwritable
from opsmith.checking.properties.numeric.forward import compare_results
from opsmith.checking.property import Findings, Note, Property, Skipped, not_run, raised
from opsmith.checking.report import Failure
from opsmith.checking.run import Case, Run, cases, each_run
from opsmith.checking.samples.cases import ALWAYS_CHECKED, LOW_PRECISION, dtype_name
from opsmith.checking.samples.memory_layouts import Layout, layouts_of, plain
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.core.functional_form import copy_with_strides, on_copies
from opsmith.core.generate_like import WHOLE
from opsmith.core.guarded_part import unusable
from opsmith.core.kernels import Kernel
from opsmith.core.tensors import resolved
from opsmith.judging.answer import Computation
from opsmith.judging.compare import SavedBits
from opsmith.judging.tensors import CPU, is_inexact
from opsmith.kernels.languages import Language, language_of
from opsmith.kernels.on_cpu import NOTE, SKIPPED, CpuCall, CpuFinding, CpuRun

DTYPES = (*ALWAYS_CHECKED, *LOW_PRECISION)
UNJUDGED = (errors.NotEmulatedError, errors.ToolchainError, errors.CacheError, errors.LanguageError)
"""Errors that prove nothing about the kernel, which then counts as unverified."""


@dataclass
class CheckedCall(CpuCall):
    """Call of a kernel on the arguments of a case."""

    case: Case = field(kw_only=True)


UNORDERED = (
    "not judged: they have equal indices, but the samples have distinct indices. The reference "
    "keeps one value for equal indices"
)
EMPTY, UNTRIED = "without a launch", "behind not run"


class KernelCheck:
    """Check of one kernel on the CPU, within the limits of the effort.

    Args:
        language: Its language.
        kernel: The kernel.
        subject: The subject of the check.

    Attributes:
        left: Number of parts that may still run.
        ran: Number of calls that ran and were judged, in each dtype.
        others: Number of other calls, by their outcome.
        limits: Reasons why calls were given up, with the number of calls.
        unfit: Reasons why the kernel refused calls.
        doubtful: Findings on doubtful but legal code.
    """

    def __init__(self, language: Language, kernel: Kernel, subject: Subject) -> None:
        assert language.on_cpu is not None
        built: Any = kernel.given
        self.name, self.declared, self.kernel, self.subject = language.key, kernel, built, subject
        self.schema = built.operator.specification.schema
        self.on_cpu = language.on_cpu(built, exhaustive=subject.effort.exhaustive, seed=subject.seed)
        self.left = getattr(subject.effort, self.on_cpu.parts)
        self.waiting: list[CheckedCall] = []
        self.over = False
        self.ran: Counter[torch.dtype] = Counter()
        self.others: Counter[str] = Counter()
        self.limits: Counter[str] = Counter()
        self.unfit: dict[str, None] = {}
        self.doubtful: dict[str, None] = {}
        self.reported: set[tuple[str, ...]] = set()

    def run(self, more: Subject, laid: Collection[Sample]) -> Findings:
        """Run all samples.

        Args:
            more: The subject with the samples to run.
            laid: Samples that also run in other layouts.
        """
        alone = replace(
            more,
            samples=tuple(each.on_cpu() for each in more.samples),
            specification=replace(more.specification, kernels=()),
        )
        taken = self.kernel.dtypes or DTYPES

        def check(run: Run) -> Findings:
            if self.over:
                return
            sample = run.sample
            for case, flat in kernel_calls(alone, sample.on_cpu(), taken, in_layouts=sample in laid):
                self.waiting.append(CheckedCall(resolved(sample.flattening.pack(flat)), case=case))
            if not self.on_cpu.compiles:
                yield from self._run()

        yield from each_run(self.name, check, more)
        if not self.over:
            yield from self._run()
        if not self.over:
            yield from self._summary()

    def _run(self) -> Findings:
        """Run the waiting calls, and compare their results with the right results."""
        calls, self.waiting = [] if self.over else self.waiting, []
        batch: list[CheckedCall] = []
        try:
            self.on_cpu.build(calls)
            for call in calls:
                if self.limits.total() >= self.on_cpu.trials and not self.ran:
                    self.others[UNTRIED] += 1
                    continue
                yield from self._prepare(call, batch)
                if len(batch) >= (self.on_cpu.together if self.ran else 1):  # giving up a call takes long
                    yield from self._judge(batch)
                    batch = []
            yield from self._judge(batch)
        except UNJUDGED as error:
            self.over = True
            yield unjudged(error)
        except errors.OpsmithError as error:
            self.over = True
            yield raised(self.name, self.subject, error, "compiled for the CPU")

    def _prepare(self, call: CheckedCall, batch: list[CheckedCall]) -> Findings:
        """Add a call to a batch, if the kernel takes it and the effort allows it."""
        specification = self.kernel.operator.specification
        cost = attempt(lambda: unwritable(specification, call.values) or self.on_cpu.prepare(call))
        if isinstance(cost, Raised):
            yield from self._raised(call, cost.error)
        elif isinstance(cost, str):
            self.unfit[cost] = None
        elif cost > min(self.left, getattr(self.subject.effort, f"call_{self.on_cpu.parts}")):
            self.others[self._too_many] += 1
        else:
            self.left -= cost
            batch.append(call)

    @property
    def _too_many(self) -> str:
        return f"not run: too many {self.on_cpu.parts} for a check"

    def _raised(self, call: CheckedCall, error: Exception) -> Findings:
        """Count a call that raises: it is a limit if the CPU cannot run the call, else a fault."""
        if isinstance(error, errors.LanguageError):
            raise error
        if isinstance(error, errors.ToolchainError):
            self.limits[f"{error.problem}: {error.got} at {error.where}"] += 1
        else:
            self.ran[call.case.dtype] += 1
            yield raised(self.name, self.subject, error, str(call.case))

    def _judge(self, calls: Sequence[CheckedCall]) -> Findings:
        """Launch calls, and yield the faults of each; if a call has none, compare its results."""
        if calls:
            announce(functools.partial(str, calls[0].case))
        for call, runs in zip(calls, self._launched(calls), strict=True):
            sample, found = call.case.sample, [(run, each) for run in runs for each in run.found]
            flat = [*sample.flattening.flatten(call.values)]
            faults = [(run, each) for run, each in found if each.cause not in (NOTE, SKIPPED)]
            limits = [f"{each.message}, at {each.where}" for _, each in found if each.cause == SKIPPED]
            races = not limits and {each.cause for _, each in faults} == {"race"}
            if races and keeps_one(self.subject, sample, flat):
                self.others[UNORDERED] += 1
                continue
            notes = [each for _, each in found if each.cause == NOTE]
            self.doubtful.update({f"{each.message}, at {each.where}: {each.hint}": None for each in notes})
            self.limits.update(dict.fromkeys(limits, 1))
            for run, each in faults:
                yield from self._reported(call, run, each)
            if faults:
                self.ran[call.case.dtype] += 1
            elif not limits:
                yield from self._compare(call, flat, runs)

    def _launched(self, calls: Sequence[CheckedCall]) -> list[list[CpuRun]]:
        """Launch calls; raise an error if the language leaves out a call, or names an unknown cause."""
        made = self.on_cpu.launch(calls) if calls else []
        counts = [len(runs) for runs in made]
        if len(counts) != len(calls) or 0 in counts:
            expected = f"a list with at least one run for each of {_calls(len(calls))}"
            raise unusable(self.on_cpu, "launch", expected, made)
        for found in (each for runs in made for run in runs for each in run.found):
            if found.cause not in (NOTE, SKIPPED, *CAUSES):
                expected = f"`CpuFinding.cause`: one of {', '.join((NOTE, SKIPPED, *CAUSES))}"
                raise unusable(self.on_cpu, "launch", expected, found.cause)
        return made

    def _compare(self, call: CheckedCall, flat: list[Any], runs: Sequence[CpuRun]) -> Findings:
        """Compare each run's results with the right results, and its arguments with their earlier values."""
        case, where = replace(call.case, name=self.name), self.kernel.where
        every = range(len(self.subject.every(case.sample)))
        labelled = zip(case.sample.labels, flat, strict=True)
        before = [(label, SavedBits.of(each)) for label, each in labelled if isinstance(each, Tensor)]
        for run in runs:
            function = self._function(run.compute)
            results = attempt(functools.partial(self.subject.kernel, case.sample, flat, function))
            if isinstance(results, Raised):
                yield from self._raised(call, results.error)
                return
            if not run.launched:
                self.others[EMPTY] += 1
            elif run is runs[0]:
                self.ran[case.dtype] += 1
            for label, kept in before:
                written = kept.written()
                if written is not None:
                    message = f"{run.what} writes into `{label}`: {written}"
                    yield Failure(self.name, label, "mutates-input", message, where, {"sample": str(case)})
            failures = [*compare_results(case, results, every, run.what, where, lambda position: None)]
            yield from failures
            if failures:
                return

    def _function(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Return a kernel that writes into copies of the arguments that it writes in place."""
        own = getattr(self.kernel.source, "function", self.kernel.operator.specification.reference)

        @functools.wraps(own)  # for its location in messages
        def computed(*args: Any, **kwargs: Any) -> Any:
            return compute(*args, **kwargs)

        return on_copies(computed, self.schema, copied=copy_with_strides) if self.schema.written else computed

    def _reported(self, call: CheckedCall, run: CpuRun, found: CpuFinding) -> Iterator[Failure]:
        key = (found.cause, *sorted((found.where, found.other_where)), found.label or "")
        if key in self.reported:
            return
        self.reported.add(key)
        other = f"{found.other_where}: {found.other_line}" if found.other_line else ""
        shown: dict[str, Any] = {"sample": str(call.case), "order of threads": run.order, "line": found.line}
        shown |= {"other line": other, "times": found.count if found.count > 1 else None}
        evidence = {name: value for name, value in shown.items() if value}
        message = f"{found.message}; {found.hint}" if found.hint else found.message
        again = check_again(self.subject, self.name)
        yield Failure(self.name, found.label, found.cause, message, found.where, evidence, again)

    def _summary(self) -> Findings:
        """Yield notes on the calls that ran; if some or all calls did not run, a reason or a failure."""
        told = {what: f"{_calls(count)} {what}" for what, count in self.others.items()}
        if self.ran:
            dtypes = ", ".join(map(dtype_name, self.ran))
            wider = self.on_cpu.in_bfloat16 if torch.bfloat16 in self.ran else ""
            yield Note(f"{self.on_cpu.manner}, not on a GPU: {_calls(self.ran.total())} in {dtypes}{wider}")
            yield from (Note(told[what]) for what in (self._too_many, UNORDERED) if what in told)
        elif self._too_many in told and not self.limits:
            yield Skipped(told[self._too_many])
            return
        if self.limits:  # a partly unverified kernel must not pass
            left = [
                f"{_calls(count)} {self.on_cpu.given_up}: {limit}" for limit, count in self.limits.items()
            ]
            yield Skipped("; ".join([*left, *(told[what] for what in (UNTRIED,) if what in told)]))
        elif not self.ran:
            dtypes = ", ".join(sorted(map(dtype_name, self.kernel.dtypes or ())))
            reasons = [*sorted(self.unfit), *filter(None, [told.get(EMPTY)])] or [f"it takes {dtypes}"]
            none = f"it takes none of the samples ({'; '.join(reasons)})"
            yield not_run(self.name, self.declared, none, "add a sample that it takes")
            return
        if self.ran:
            yield from map(Skipped, filter(None, [self.on_cpu.unseen()]))
            yield from map(Note, self.on_cpu.notes())
        yield from map(Note, self.doubtful)


def unjudged(error: errors.OpsmithError) -> Skipped:
    """Return the text of an error that proves nothing about a kernel, as the reason why it is unverified."""
    return Skipped(": ".join(filter(None, [error.problem, error.got])), error.hint or "")


def _calls(number: int) -> str:
    return "1 call" if number == 1 else f"{number} calls"


def kernel_calls(
    subject: Subject, sample: Sample, taken: Collection[torch.dtype], *, in_layouts: bool
) -> Iterator[tuple[Case, list[Any]]]:
    """Yield the calls of a sample, each with its case and its flat arguments.

    Args:
        subject: The subject of the check without kernels, so that its only device is the CPU.
        sample: The sample, on the CPU.
        taken: The dtypes of floating tensors that the kernel takes.
        in_layouts: True to try each tensor in other layouts too, as many as the effort allows.
    """
    tried = tuple(dtype for dtype in DTYPES if dtype in taken) if sample.inexact else ALWAYS_CHECKED
    if not tried:
        return
    right, reference = None, functools.partial(subject.reference, sample)
    of_layouts = islice(layouts_of([*map(plain, sample.flat)]), subject.effort.layouts if in_layouts else 0)
    for laid in (None, *of_layouts):
        arguments, of_laid = functools.partial(_laid, sample, laid), right
        if right is None or (laid is not None and laid[1].repeats):  # the numbers change
            flat = arguments(None if laid is None else torch.float64, CPU)
            of = functools.partial(Computation.of, has_truth=subject.has_truth)
            made = attempt(functools.partial(of, reference, flat, subject.generator()))
            if isinstance(made, Raised):
                if laid is None:
                    raise made.error
                continue  # the reference does not take these numbers
            of_laid = made
            right = right or made
        assert of_laid is not None
        for case in cases(Run(subject, sample), of_laid, tried, arguments):
            if isinstance(case, Case) and case.device == CPU:
                yield case, arguments(case.dtype, case.device)


def _laid(
    sample: Sample, laid: tuple[int, Layout] | None, dtype: torch.dtype | None, device: torch.device
) -> list[Any]:
    """Return the flat arguments of a sample, with one argument in a layout."""
    flat = sample.at(dtype, device)
    if laid is not None:
        flat[laid[0]] = laid[1].of(plain(flat[laid[0]]))
    return flat


ELEMENTS = 64
"""Maximum number of elements of a tensor that are tested for an influence on a result."""


def keeps_one(subject: Subject, sample: Sample, flat: Sequence[Any]) -> bool:
    """Return True if a call has equal indices, unlike the samples, and the reference keeps one of their
    values.

    The order of the writes then decides the result, and an author may exclude such calls, for example for the
    slots of a cache. Lost values change no result; if a reference adds up the values, none is lost.

    Args:
        subject: The subject of the check.
        sample: The sample, which may be a derived sample.
        flat: Flat arguments of the call.
    """

    def repeats(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dtype in WHOLE and len(value.unique()) < value.numel()

    shapes = [getattr(value, "shape", None) for value in flat]
    authors = (each for each in subject.samples if not each.origin)
    own = next((each for each in authors if [getattr(v, "shape", None) for v in each.flat] == shapes), None)
    if own is None or not any(
        repeats(here) and not repeats(given) for here, given in zip(flat, own.flat, strict=True)
    ):
        return False
    wide = [each.double() if is_inexact(each) and not each.is_complex() else each for each in flat]
    lost, before = (
        attempt(functools.partial(_lost, subject, sample, each)) for each in (wide, own.in_double())
    )
    if isinstance(lost, Raised) or isinstance(before, Raised):
        return False  # nothing is known
    return any(now > once for now, once in zip(lost, before, strict=True))


def _lost(subject: Subject, sample: Sample, flat: Sequence[Any]) -> list[int]:
    """Return, for each floating tensor, the number of tested elements that change no result."""

    def results(argnum: int = 0, at: int | None = None) -> list[Any]:
        copies = [each.contiguous().clone() if isinstance(each, Tensor) else each for each in flat]
        if at is not None:
            copies[argnum].view(-1)[at] += 1
        return subject.reference(sample, copies)

    right, found = results(), []
    for argnum in sample.inexact:
        tried = range(0, flat[argnum].numel(), -(-flat[argnum].numel() // ELEMENTS) or 1)
        pairs = (zip(results(argnum, at), right, strict=True) for at in tried)
        same = (all(not isinstance(a, Tensor) or torch.equal(a, b) for a, b in pair) for pair in pairs)
        found.append(sum(same))
    return found


def run(language: Language, subject: Subject) -> Findings:
    """Run every kernel of a language on the CPU on every sample, in every dtype and layout that it takes."""
    kernels = {
        each.given: each for each in subject.specification.kernels if language_of(each.given) is language
    }
    if not kernels:
        yield Skipped(f"the operator has no kernel in {language.name}")
        return
    on_cpu = tuple(Kernel("cpu", each.function) for each in kernels.values())
    with_kernels = replace(subject, specification=replace(subject.specification, kernels=on_cpu))
    more = replace(subject, samples=(*subject.samples, *kernel_sizes(with_kernels)))
    laid = forms(subject)
    for kernel in kernels.values():
        yield from unverified_too(subject, kernel, _judged(language, kernel, subject, more, laid))


def _judged(
    language: Language, kernel: Kernel, subject: Subject, more: Subject, laid: Collection[Sample]
) -> Findings:
    """Run a kernel on the CPU; if its language fails, it is unverified, and the other kernels still run."""
    try:
        yield from KernelCheck(language, kernel, subject).run(more, laid)
    except errors.LanguageError as error:
        yield unjudged(error)


def on_cpu_property(language: Language) -> Property | None:
    """Return the property of a language; None if it does not run kernels on the CPU for `check`."""
    if language.on_cpu is None:
        return None
    return Property(language.key, language.on_cpu.promise, functools.partial(run, language), inputs="every")
