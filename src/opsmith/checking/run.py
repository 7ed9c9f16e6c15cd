"""Run of a sample: calls with their graphs, the results and gradients of these, and what is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, Self

import torch
from torch import Tensor

from opsmith.checking.calls import differentiated, rule_location
from opsmith.checking.exceptions import Overlooking, Raised, attempt, first_line, refuse_own
from opsmith.checking.numerics.autodiff import differentiate, has_gradient, record
from opsmith.checking.processes.watchdog import OutOfTimeError, time_limit
from opsmith.checking.property import Findings, Note, Skipped, raised
from opsmith.checking.report import Failure
from opsmith.checking.samples.cases import ALWAYS_CHECKED, case_name, dtype_name
from opsmith.checking.samples.grad_outputs import random_grad_output
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.core.cached_property import cached_property
from opsmith.judging.answer import Answer, Computation
from opsmith.judging.compare import differ_beyond_rounding, same_bits
from opsmith.judging.tensors import dense


@dataclass
class LiveCall:
    """A call with its graph.

    Args:
        subject: The subject of the check.
        sample: The sample.
        argnums: The arguments that require a gradient.
        leaves: Flat arguments, those at `argnums` as leaves of autograd.
        given: Arguments of the call: the leaves, or recorded copies where the operator refuses leaves.
        results: The visible results.
    """

    subject: Subject
    sample: Sample
    argnums: tuple[int, ...]
    leaves: list[Any]
    given: list[Any]
    results: list[Any]

    @property
    def open(self) -> list[int]:
        """Positions of the results that take a grad_output."""
        return [at for at, result in enumerate(self.results) if result is not None and has_gradient(result)]

    @property
    def outputs(self) -> list[Tensor]:
        """The results that take a grad_output."""
        return [self.results[at] for at in self.open]

    @property
    def inputs(self) -> list[Tensor]:
        """The leaves that require a gradient."""
        return [self.leaves[argnum] for argnum in self.argnums]

    def again(self, leaves: list[Any] | None = None) -> LiveCall:
        """Another call with the same leaves, or with new copies of them; or with others in their place."""
        made = self.leaves if leaves is None else leaves
        with torch.enable_grad():
            given = [
                leaf.clone() if isinstance(leaf, Tensor) and own is not before else leaf
                for leaf, own, before in zip(made, self.leaves, self.given, strict=True)
            ]
            return replace(self, leaves=made, given=given, results=self.subject.call(self.sample, given))

    def grads(self) -> list[Tensor]:
        """Contiguous grad_outputs, the same for the same shapes."""
        generator = self.subject.generator()
        return [random_grad_output(each, generator) for each in self.outputs]

    def backward(self, grads: Sequence[Tensor | None] | None = None, **options: Any) -> list[Tensor | None]:
        """Compute the gradient by each argument; nothing is accumulated.

        Args:
            grads: The grad_output of each open result; None for `self.grads()`.
            options: As of `torch.autograd.grad`.
        """
        given = self.grads() if grads is None else grads
        return differentiate(self.outputs, self.inputs, given, **options)

    def values(self) -> CallValues:
        """The results, as they are now, and the gradients of a backward, kept as copies."""
        results = copies(self.results)  # before the backward, which may write into them
        return CallValues(results, copies(self.backward()))


@dataclass(frozen=True)
class Run:
    """A sample of one property: in a dtype, on a device, by the arguments that require a gradient.

    An author's code runs through it, and what is found is reported by it.

    Args:
        subject: The subject of the check.
        sample: The sample.
        name: Name of the property.
        place: The device; the sample's own by default.
        dtype: dtype of floating tensors; their own by default.
        by: Arguments that require a gradient; None for all that have one to check.
        changed: Changes the arguments; None for the sample's own.
        words: Its name in messages; by default the sample, and its dtype and device if it has a dtype.
    """

    subject: Subject
    sample: Sample
    name: str = ""
    place: torch.device | None = None
    dtype: torch.dtype | None = None
    by: tuple[int, ...] | None = None
    changed: Callable[[list[Any]], list[Any]] | None = None
    words: str = ""

    @classmethod
    def of(cls, subject: Subject, sample: Sample, name: str = "") -> list[Self]:
        """The runs of a sample, one on each device."""
        by = differentiated(subject, sample).argnums  # which may call it
        return [cls(subject, sample, name, device, by=by) for device in subject.devices]

    def __str__(self) -> str:
        if self.words or self.dtype is None:
            return self.words or str(self.sample)
        return case_name(self.sample, self.dtype, self.device)

    @property
    def device(self) -> torch.device:
        """The device."""
        return self.place or self.sample.home

    @cached_property
    def argnums(self) -> tuple[int, ...]:
        """The arguments that require a gradient."""
        return differentiated(self.subject, self.sample).argnums if self.by is None else self.by

    def alone(self, argnum: int) -> Self:
        """The same where one argument alone requires a gradient."""
        return replace(self, by=(argnum,))

    def flat(self) -> list[Any]:
        """The arguments, in fresh memory."""
        own = self.sample.at(self.dtype, self.place)
        return own if self.changed is None else self.changed(own)

    def call(self, flat: Sequence[Any] | None = None, *, leaf: bool = True) -> LiveCall:
        """A new call with its graph.

        Args:
            flat: Flat arguments; those that require a gradient get the same memory. Fresh ones by default.
            leaf: True to pass leaves; else copies that autograd has computed from them.
        """
        given = self.flat() if flat is None else flat
        made = record(partial(self.subject.call, self.sample), given, self.argnums, leaf=leaf)
        return LiveCall(self.subject, self.sample, self.argnums, *made)

    def values(self, flat: Sequence[Any] | None = None) -> CallValues:
        """The results and gradients of a new call, of given arguments or of fresh ones."""
        return self.call(flat).values()

    def keeps_state(self, label: str) -> bool:
        """True if an argument is written into on purpose, as running statistics are.

        What a call leaves in it is made of other arguments, no result depends on what it held, it has no
        gradient, and a second backward through the same graph gives the same gradients.
        """
        if self.sample.change is not None:
            return replace(self, sample=self.sample.change.of).keeps_state(label)
        if not self.subject.kind.own_forward or label not in self.sample.labels:
            return False
        kept, left = self.sample.labels.index(label), list[Tensor]()
        with Overlooking():
            other = self.flat()
            other[kept] = other[kept] + 1
            if differing(copies(self.call().results), copies(self.call(other).results)):
                return False
            for factor in (1.0, FRESH):
                flat = self.flat()
                for at in (at for at in self.sample.inexact if at != kept):
                    flat[at] = flat[at] * factor
                call = self.call(flat)
                first = copies(call.backward(retain_graph=True)) if call.open else ()
                left.append(call.given[kept].detach().clone())
                by_it = (each for by, each in zip(self.argnums, first, strict=False) if by == kept)
                second = attempt(partial(call.backward, retain_graph=True)) if first else ()
                if any(each is not None and each.any() for each in by_it):
                    return False
                if not isinstance(second, Raised) and differing(first, second):
                    return False
            return not same_bits(*left)
        return False

    def names(self, where: str = "") -> list[TensorName]:
        """The name of each tensor of `CallValues.tensors`.

        Args:
            where: `file:line` of what computes them all; by default of the call, and of each gradient's rule.
        """
        labels, calls = self.sample.labels, where or self.subject.runs_at(self.sample.flat)
        results = self.subject.results(self.sample)
        gradients = [
            TensorName(labels[argnum], "gradient", where or self.backward_location(at))
            for at, argnum in enumerate(self.argnums)
        ]
        return [*(TensorName(each.name, "result", calls) for each in results), *gradients]

    def backward_location(self, at: int = 0) -> str:
        """`file:line` of what computes the gradient by one of the arguments."""
        return rule_location(self.subject, self.sample.names[self.argnums[at]])

    def evidence(self) -> dict[str, Any]:
        """Evidence of every failure that it shows."""
        return {"sample": str(self)}

    def failure(
        self,
        about: str | int | None,
        cause: str,
        message: str,
        where: str | None = None,
        evidence: Mapping[str, Any] = MappingProxyType({}),
        **more: Any,
    ) -> Failure:
        """A failure that this run shows.

        Args:
            about: The argument or result; the position of an argument whose gradient it is about; or None.
            cause: Its cause.
            message: Its description.
            where: `file:line` of what is at fault; by default the rule of that gradient, or the operator.
            evidence: Evidence beside the name of the run.
            more: Further fields of the failure.
        """
        if isinstance(about, int):
            where = where or rule_location(self.subject, self.sample.names[about])
            about = self.sample.labels[about]
        where = where or self.subject.specification.where
        shown = {**self.evidence(), **evidence}
        return Failure(self.name, about, cause, message, where, shown, **more)

    def raised(self, error: BaseException, input: str | None = None) -> Failure:
        """The failure for an exception of the operator."""
        return raised(self.name, self.subject, error, str(self), input)


FRESH = 1.25
"""Factor that takes numbers to others of their kind."""


@dataclass(frozen=True)
class TensorName:
    """Name of a result, or of a gradient.

    Args:
        name: Name of the result, or of the input that the gradient is with respect to.
        kind: Kind of the tensor.
        where: `file:line` of what computes it.
    """

    name: str
    kind: Literal["result", "gradient"]
    where: str

    def __str__(self) -> str:
        return f"`{self.name}`" if self.kind == "result" else f"the gradient of `{self.name}`"


@dataclass(frozen=True)
class CallValues:
    """Results and gradients of a call, as copies.

    Args:
        results: The visible results.
        gradients: The gradient by each argument; None for each if no result requires one, so that a lost
            graph shows in a comparison.
    """

    results: tuple[Tensor | None, ...]
    gradients: tuple[Tensor | None, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The results, then the gradients."""
        return (*self.results, *self.gradients)


def copies(tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Copies of tensors, detached from the graph."""
    return tuple(None if tensor is None else tensor.detach().clone() for tensor in dense(tensors))


def differing(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> list[int]:
    """Positions of the tensors that differ by more than rounding, of those that both have."""
    pairs = enumerate(zip(one, other, strict=False))
    return [at for at, pair in pairs if differ_beyond_rounding(*pair)]


def each_run(
    property: str, check: Callable[[Run], Findings], subject: Subject, *, devices: bool = False
) -> Findings:
    """Run a function on every sample; an exception of the operator is a finding, and ends nothing.

    A slow operator is not called any more once the seconds of the effort are over: that is a limit.

    Args:
        property: Name of the property.
        check: Checks one run.
        subject: The subject of the check.
        devices: True to run each sample on every device.
    """
    with time_limit(subject.effort.seconds):
        for at, sample in enumerate(subject.samples):
            try:
                for run in Run.of(subject, sample, property) if devices else [Run(subject, sample, property)]:
                    yield from check(run)
            except OutOfTimeError:
                seconds, count = subject.effort.seconds, len(subject.samples)
                message = (
                    f"{count - at} of {count} inputs were left out, or were not finished: {seconds:g} s are "
                    "over; give smaller samples, or an effort with more `seconds`"
                )
                where = subject.specification.where
                yield Failure(property, None, "not-exercised", message, where, replay="")
                return
            except BaseException as error:
                refuse_own(error)
                yield raised(property, subject, error, str(sample))


@dataclass
class Coverage:
    """Progress of one run of a property over the samples.

    Args:
        ran: Number of samples, or of calls, that were checked.
        refused: Reasons why parts of the property were not checked.
        wrong: Inputs and results already found wrong: other failures of them would report the same. None
            stands for a failure of none of them.
    """

    ran: int = 0
    refused: dict[str, None] = field(default_factory=dict)
    wrong: set[str | None] = field(default_factory=set)


def covered_runs(
    property: str,
    check: Callable[[Run, Coverage], Findings],
    unchecked: str,
    subject: Subject,
    *,
    noted: str = "",
) -> Findings:
    """Run a function on every sample, then report the parts that were not checked.

    They are notes if something was checked, else the reason for skipping.

    Args:
        check: Checks one run, and records its progress.
        unchecked: Reason for skipping if nothing was refused.
        noted: Words before each note.
    """
    coverage, failed = Coverage(), False
    for finding in each_run(property, lambda run: check(run, coverage), subject):
        failed = failed or isinstance(finding, Failure)
        yield finding
    if coverage.ran or failed:
        yield from (Note(f"{noted}{reason}") for reason in coverage.refused)
    else:
        yield Skipped("; ".join(coverage.refused) or unchecked)


@dataclass(frozen=True)
class Case(Run):
    """A run with the right answers in its dtype."""

    dtype: torch.dtype = torch.float64
    answers: tuple[Answer, ...] = ()


def cases(
    run: Run,
    right: Computation,
    dtypes: Sequence[torch.dtype],
    arguments: Callable[[torch.dtype, torch.device], list[Any]] | None = None,
) -> list[Case | Note]:
    """Make the cases of a run, and a note for each that cannot be made.

    Args:
        run: The run, without a dtype or a device.
        right: Computation of the right results.
        dtypes: dtypes of floating tensors; a sample without any makes one case.
        arguments: Arguments of the computation; those of the sample by default.
    """
    single, given = run.subject.single_precision, arguments or run.sample.at
    places = [
        (dtype, device)
        for dtype in ((torch.float32,) if single else dtypes if run.sample.inexact else dtypes[:1])
        for device in run.subject.devices
    ]
    left = Note("dtypes other than float32 were left out: that is what it computes in")
    return [left] * single + [_case(run, right, *place, given) for place in places]


def _case(
    run: Run,
    right: Computation,
    dtype: torch.dtype,
    device: torch.device,
    arguments: Callable[[torch.dtype, torch.device], list[Any]],
) -> Case | Note:
    left = f"{dtype_name(dtype)} was left out"
    if not run.sample.takes(dtype):
        return Note(f"{left} where a sample is complex: it has no complex form")
    try:
        flat = arguments(dtype, device)
    except (RuntimeError, TypeError) as error:
        return Note(f"{left} on {device.type}, which does not have it: {first_line(error)}")
    try:
        answers = right.at(flat, dtype)
    except Exception as error:
        refuse_own(error)
        if dtype in ALWAYS_CHECKED:
            raise
        return Note(f"{left}: the reference does not run in it: {first_line(error)}")
    return Case(run.subject, run.sample, run.name, device, dtype, run.by, answers=answers)
