"""Run of a sample: calls with their graphs, results and gradients, and the failures that they show."""

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
        leaves: Flat arguments; the arguments at `argnums` are leaves of autograd.
        given: Arguments of the call: the leaves, or recorded copies if the operator refuses leaves.
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
        """Another call with the same leaves, with new copies of them, or with different leaves."""
        made = self.leaves if leaves is None else leaves
        with torch.enable_grad():
            given = [
                leaf.clone() if isinstance(leaf, Tensor) and own is not before else leaf
                for leaf, own, before in zip(made, self.leaves, self.given, strict=True)
            ]
            return replace(self, leaves=made, given=given, results=self.subject.call(self.sample, given))

    def grads(self) -> list[Tensor]:
        """Contiguous grad_outputs; equal shapes get equal grad_outputs."""
        generator = self.subject.generator()
        return [random_grad_output(each, generator) for each in self.outputs]

    def backward(self, grads: Sequence[Tensor | None] | None = None, **options: Any) -> list[Tensor | None]:
        """Compute the gradient by each argument, without accumulating it in `.grad`.

        Args:
            grads: The grad_output of each open result; None for `self.grads()`.
            options: As for `torch.autograd.grad`.
        """
        given = self.grads() if grads is None else grads
        return differentiate(self.outputs, self.inputs, given, **options)

    def values(self) -> CallValues:
        """Copies of the results in their current state, and of the gradients of a backward."""
        results = copies(self.results)  # before the backward, which may write into them
        return CallValues(results, copies(self.backward()))


@dataclass(frozen=True)
class Run:
    """A sample as one property runs it: dtype, device, and the arguments that require a gradient.

    Each call of an author's code goes through a run, which also makes the failures.

    Args:
        subject: The subject of the check.
        sample: The sample.
        name: Name of the property.
        place: The device; the sample's own by default.
        dtype: dtype of floating tensors; each tensor's own by default.
        by: Arguments that require a gradient; None for all that have a gradient to check.
        changed: Changes the arguments; None for the sample's own.
        words: Name of the run in messages; by default the sample, with dtype and device if `dtype` is set.
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
        """The runs of a sample: one run on each device."""
        by = differentiated(subject, sample).argnums  # this may call the operator
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
        """The same run, in which only one argument requires a gradient."""
        return replace(self, by=(argnum,))

    def flat(self) -> list[Any]:
        """The arguments, in fresh memory."""
        own = self.sample.at(self.dtype, self.place)
        return own if self.changed is None else self.changed(own)

    def call(self, flat: Sequence[Any] | None = None, *, leaf: bool = True) -> LiveCall:
        """A new call with its graph.

        Args:
            flat: Flat arguments, by default fresh ones; leaves share the memory of those that require a
                gradient.
            leaf: True to pass leaves; else copies of the leaves that autograd has recorded.
        """
        given = self.flat() if flat is None else flat
        made = record(partial(self.subject.call, self.sample), given, self.argnums, leaf=leaf)
        return LiveCall(self.subject, self.sample, self.argnums, *made)

    def values(self, flat: Sequence[Any] | None = None) -> CallValues:
        """The results and gradients of a new call, with the given arguments or fresh arguments."""
        return self.call(flat).values()

    def keeps_state(self, label: str) -> bool:
        """True if an argument is written into on purpose, such as running statistics.

        This holds if a call computes its new value from other arguments, no result depends on its old value,
        it has no gradient, and a second backward through the same graph gives the same gradients.
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
            where: `file:line` of the code that computes all tensors; by default of the call, and of each
                gradient's rule.
        """
        labels, calls = self.sample.labels, where or self.subject.runs_at(self.sample.flat)
        results = self.subject.results(self.sample)
        gradients = [
            TensorName(labels[argnum], "gradient", where or self.backward_location(at))
            for at, argnum in enumerate(self.argnums)
        ]
        return [*(TensorName(each.name, "result", calls) for each in results), *gradients]

    def backward_location(self, at: int = 0) -> str:
        """`file:line` of the code that computes the gradient by one of the arguments."""
        return rule_location(self.subject, self.sample.names[self.argnums[at]])

    def evidence(self) -> dict[str, Any]:
        """Evidence of every failure that the run shows."""
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
            where: `file:line` of the faulty code; by default of the gradient's rule, or of the operator.
            evidence: Evidence in addition to the name of the run.
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
"""Factor that changes numbers to similar numbers."""


@dataclass(frozen=True)
class TensorName:
    """Name of a result, or of a gradient.

    Args:
        name: Name of the result, or of the input of which it is the gradient.
        kind: Kind of the tensor.
        where: `file:line` of the code that computes it.
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
        gradients: The gradient by each argument; None for each if no result requires a gradient, so that a
            comparison shows a lost graph.
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
    """Positions of the tensors, among those that both calls have, that differ by more than rounding."""
    pairs = enumerate(zip(one, other, strict=False))
    return [at for at, pair in pairs if differ_beyond_rounding(*pair)]


def each_run(
    property: str, check: Callable[[Run], Findings], subject: Subject, *, devices: bool = False
) -> Findings:
    """Run a function on every sample; an exception of the operator becomes a failure, and the check goes on.

    After the seconds of the effort, a slow operator is not called any more, which is a limit.

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
                    f"{count - at} of {count} inputs were left out or not finished after {seconds:g} s; use "
                    f"smaller samples, or an effort with more `seconds`"
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
        wrong: Inputs and results already found wrong, whose other failures would report the same fault. None
            stands for a failure without an input or result.
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
    """Run a function on every sample, then yield the parts that were not checked.

    These are notes if at least one part was checked, else the reason for skipping.

    Args:
        check: Checks one run, and records its progress.
        unchecked: Reason for skipping if nothing was refused.
        noted: Text before each note.
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
    """A run, with the right results in its dtype."""

    dtype: torch.dtype = torch.float64
    answers: tuple[Answer, ...] = ()


def cases(
    run: Run,
    right: Computation,
    dtypes: Sequence[torch.dtype],
    arguments: Callable[[torch.dtype, torch.device], list[Any]] | None = None,
) -> list[Case | Note]:
    """Make the cases of a run, and a note for each case that cannot be made.

    Args:
        run: The run, without a dtype or a device.
        right: Computation of the right results.
        dtypes: dtypes of floating tensors; a sample without floating tensors makes one case.
        arguments: Arguments of the computation; the sample's by default.
    """
    single, given = run.subject.single_precision, arguments or run.sample.at
    places = [
        (dtype, device)
        for dtype in ((torch.float32,) if single else dtypes if run.sample.inexact else dtypes[:1])
        for device in run.subject.devices
    ]
    left = Note("dtypes other than float32 were left out: the operator computes in float32")
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
        return Note(f"{left} for complex samples: this dtype has no complex form")
    try:
        flat = arguments(dtype, device)
    except (RuntimeError, TypeError) as error:
        return Note(f"{left} on {device.type}, which does not support it: {first_line(error)}")
    try:
        answers = right.at(flat, dtype)
    except Exception as error:
        refuse_own(error)
        if dtype in ALWAYS_CHECKED:
            raise
        return Note(f"{left}: the reference does not run in this dtype: {first_line(error)}")
    return Case(run.subject, run.sample, run.name, device, dtype, run.by, answers=answers)
