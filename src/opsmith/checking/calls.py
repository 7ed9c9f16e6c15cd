"""Recorded calls: the inputs to differentiate by, an operator under autograd, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from operator import is_
from typing import Any, Literal, Self

import torch
from torch import Tensor

from opsmith.adopting.outputs import never_returned
from opsmith.adopting.signature import forward_signature
from opsmith.checking.effort import Effort
from opsmith.checking.exceptions import Overlooking, raised_within, refuse_own, stated
from opsmith.checking.numerics.autodiff import differentiate, has_gradient, record
from opsmith.checking.property import first_line
from opsmith.checking.samples.grad_outputs import (
    plain_grad_outputs,
    random_grad_output,
    results_with_gradient,
)
from opsmith.checking.samples.sample import Sample
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.checking.subject import Subject
from opsmith.core.call_arguments import tensors_in
from opsmith.core.formula import Formula, NonDifferentiable, NotImplementedGradient
from opsmith.core.location import where
from opsmith.judging.tensors import dense, replica
from opsmith.judging.working_precision import working_precision
from opsmith.torch_library.torch_messages import NO_DERIVATIVE, has_message


@dataclass(frozen=True)
class Differentiated:
    """The flat arguments of a sample that gradients flow to.

    Args:
        argnums: Those to check.
        refused: The reason for each input that has no gradient to check.
    """

    argnums: tuple[int, ...]
    refused: dict[str, str]

    def subsets(self, effort: Effort | None = None) -> Iterator[tuple[int, ...]]:
        """Each input alone, then all of them together; with an effort, other choices too.

        Args:
            effort: Level of effort: every choice of up to four inputs; of more, every pair, and all but one.
                With `quick`, all but one.
        """
        for argnum in self.argnums:
            yield (argnum,)
        if len(self.argnums) > 1:
            yield self.argnums
        if effort is None or len(self.argnums) < 3:
            return
        frozen = len(self.argnums) - 1
        every = range(2, len(self.argnums)) if len(self.argnums) <= 4 else sorted({2, frozen})
        sizes = every if effort.input_choices else [frozen]
        for size in sizes:
            yield from combinations(self.argnums, size)


def differentiated(subject: Subject, sample: Sample) -> Differentiated:
    """Select the inputs of a sample to differentiate by: floating tensors with a gradient, derived or given.

    There are none if no result has a dtype with gradients. A floating result without a graph still counts:
    finite differences must confirm that it is constant. Most properties ask; the operator is called once.
    """
    return subject.once("differentiated", sample, lambda: _differentiated(subject, sample))


def _differentiated(subject: Subject, sample: Sample) -> Differentiated:
    if not any(results_with_gradient(subject, sample, subject.call(sample, sample.at()))):
        return Differentiated((), {})
    rules = subject.specification.gradients
    argnums: list[int] = []
    stated_refusals = refusals_in(subject, sample)
    refused: dict[str, str] = {}
    for argnum in sample.inexact:
        name = sample.names[argnum]
        rule = rules.rules.get(name)
        if sample.is_buffer(argnum):
            refused[name] = f"`{name}` has no elements: there is no gradient by it to compare"
        elif name in stated_refusals:
            refused[name] = f"it refuses a gradient by `{name}`: {stated_refusals[name]}"
        elif isinstance(rule, NotImplementedGradient):
            refused[name] = f"the gradient of `{name}` is not implemented: {rule.reason}"
        elif subject.kind.in_library:
            if not subject.lacks("gradient"):
                argnums.append(argnum)
            else:
                refused[name] = "it has no gradient: `torch.library.register_autograd` gives it one"
        elif rule is None and subject.specification.opaque and rules.stand_in is None:
            refused[name] = (
                f"`{name}` has no gradient: the operator is opaque; write "
                f"`.gradients({name}=lambda grad: ...)`, or `{name}=opsmith.non_differentiable`"
            )
        elif not isinstance(rule, NonDifferentiable):
            argnums.append(argnum)
    if subject.kind.has_reference:
        derived = [argnum for argnum in argnums if sample.names[argnum] not in rules.rules]
        if derived and sample.position not in subject.refusals:
            subject.refusals[sample.position] = _refusals_in(subject, sample, derived, _without_derivative)
        lacking = subject.refusals.get(sample.position, {})
        refused.update(
            {name: f"torch has no derivative by `{name}`: {text}" for name, text in lacking.items()}
        )
        argnums = [argnum for argnum in argnums if sample.names[argnum] not in lacking]
    return Differentiated(tuple(argnums), refused)


def computed_in(subject: Subject, sample: Sample, *, by_reference: bool = False) -> torch.dtype:
    """Return the dtype that a call or its backward computes in for arguments in float64: that, or float32.

    It is declared, or else measured, on results and gradients together: of a gradient that is zero but for
    rounding, nothing says how large its terms are.

    Args:
        subject: The subject of the check.
        sample: The sample.
        by_reference: True for the reference, and autograd through it.
    """
    if subject.single_precision:
        return torch.float32
    call = subject.plain(sample) if by_reference else partial(subject.call, sample)
    what = f"computed in, by_reference={by_reference}"
    return subject.once(what, sample, partial(_computed_in, subject, sample, call))


def _computed_in(subject: Subject, sample: Sample, call: Callable[[list[Any]], Any]) -> torch.dtype:
    with Overlooking(), without_warnings():  # what it raises, other properties report
        argnums = differentiated(subject, sample).argnums
        grads = plain_grad_outputs(subject, sample).in_double()

        def function(flat: list[Any]) -> list[Tensor | None]:
            leaves, _, results = record(call, flat, argnums)
            return [*results, *differentiate(results, [leaves[argnum] for argnum in argnums], grads)]

        return working_precision(function, sample.in_double(), subject.generator())
    return torch.float64


def refusals_in(subject: Subject, sample: Sample) -> dict[str, str]:
    """Inputs by which a class refuses a gradient for a sample by an error of its own code, with its text.

    It does so whenever the input requires a gradient, alone and with all others.
    """
    if not subject.kind.own_forward:
        return {}
    if sample.position not in subject.refusals:
        subject.refusals[sample.position] = _refusals_in(subject, sample, sample.inexact, _statement)
    return subject.refusals[sample.position]


Words = Callable[[Exception], str | None]
"""Function that returns the words of an error that refuses a gradient; None for any other error."""


def _refusals_in(subject: Subject, sample: Sample, argnums: Sequence[int], words: Words) -> dict[str, str]:
    """The inputs by which a backward is refused, alone and with the others, and the words."""
    if _refusal(subject, sample, argnums, words) is None:
        return {}
    alone = {sample.names[argnum]: _refusal(subject, sample, (argnum,), words) for argnum in argnums}
    return {name: text for name, text in alone.items() if text is not None}


def _refusal(subject: Subject, sample: Sample, argnums: Sequence[int], words: Words) -> str | None:
    """The words by which a backward is refused where these inputs require a gradient; None if it is not."""
    try:
        leaves, _, results = record(partial(subject.call, sample), sample.at(), argnums)
        grads = [torch.ones_like(each) if has_gradient(each) else None for each in tensors_in(results)]
        differentiate(tensors_in(results), [leaves[argnum] for argnum in argnums], grads)
    except Exception as error:
        refuse_own(error)
        return words(error)
    return None


def _statement(error: Exception) -> str | None:
    """The error that the operator's own code states, and not for another one that surprised it."""
    before = None if error.__suppress_context__ else error.__context__
    surprised = isinstance(before, Exception) and not isinstance(before, ImportError) and not stated(before)
    return f"{type(error).__name__}: {first_line(error)}" if stated(error) and not surprised else None


def _without_derivative(error: Exception) -> str | None:
    """The words of torch where it has no derivative of an operation."""
    lacks = isinstance(error, RuntimeError) and has_message(error, NO_DERIVATIVE)
    return first_line(error) if lacks and not raised_within(error) else None


def leaves_out(subject: Subject, name: str) -> bool:
    """True if a class's backward returns None for an input in every return statement: it may be meant."""
    origin = subject.specification.origin
    if origin.kind != "class":
        return False
    parameters = [*forward_signature(origin.subject).parameters]
    return name in parameters and never_returned(origin.subject.backward, parameters.index(name))


def rule_location(subject: Subject, name: str) -> str:
    """`file:line` of what computes the gradient of an input."""
    specification = subject.specification
    rule = specification.gradients.rules.get(name)
    if isinstance(rule, Formula):
        return rule.where
    if subject.kind.in_library:
        return specification.where_of("gradient")
    stand_in = specification.gradients.stand_in
    return where(stand_in) if stand_in is not None and rule is None else specification.where


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

    def again(self) -> LiveCall:
        """Another call with the same leaves, or with new copies of them."""
        with torch.enable_grad():
            given = [
                leaf if same else leaf.clone()
                for leaf, same in zip(self.leaves, map(is_, self.leaves, self.given), strict=True)
            ]
            return replace(self, given=given, results=self.subject.call(self.sample, given))

    def grads(self) -> list[Tensor]:
        """Contiguous grad_outputs, the same for the same shapes."""
        generator = self.subject.generator()
        return [random_grad_output(each, generator) for each in self.outputs]

    def backward(self, grads: Sequence[Tensor] | None = None, **options: Any) -> list[Tensor | None]:
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


def live_call(
    subject: Subject, sample: Sample, flat: Sequence[Any], argnums: Sequence[int], *, leaf: bool = True
) -> LiveCall:
    """Call an operator with some of its arguments requiring gradients.

    Args:
        subject: The subject of the check.
        sample: The sample that the arguments are of.
        flat: Flat arguments; those that require a gradient get the same memory.
        argnums: Arguments that require a gradient.
        leaf: True to pass leaves; else copies that autograd has computed from them.
    """
    leaves, given, results = record(partial(subject.call, sample), flat, argnums, leaf=leaf)
    return LiveCall(subject, sample, tuple(argnums), leaves, given, results)


@dataclass(frozen=True)
class SampleRun:
    """A sample on a device, to be called and differentiated.

    Args:
        subject: The subject of the check.
        sample: The sample.
        argnums: Arguments that require a gradient.
        device: The device.
        changed: Changes the arguments; None for the sample's own.
        dtype: dtype of floating tensors; their own by default.
    """

    subject: Subject
    sample: Sample
    argnums: tuple[int, ...]
    device: torch.device
    changed: Callable[[list[Any]], list[Any]] | None = None
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, subject: Subject, sample: Sample) -> list[Self]:
        """The runs of a sample, one on each device."""
        argnums = differentiated(subject, sample).argnums
        return [cls(subject, sample, argnums, device) for device in subject.devices]

    def flat(self) -> list[Any]:
        """The arguments, in fresh memory."""
        own = self.sample.at(self.dtype, self.device)
        return own if self.changed is None else self.changed(own)

    def call(self, flat: Sequence[Any] | None = None, *, leaf: bool = True) -> LiveCall:
        """A new call with its graph."""
        given = self.flat() if flat is None else flat
        return live_call(self.subject, self.sample, given, self.argnums, leaf=leaf)

    def values(self) -> CallValues:
        """The results and gradients of a new call."""
        return self.call().values()

    def names(self) -> list[TensorName]:
        """The name of each tensor of `CallValues.tensors`."""
        labels, where = self.sample.labels, self.subject.runs_at(self.sample.flat)
        results = self.subject.results(self.sample)
        gradients = [
            TensorName(labels[argnum], "gradient", self.backward_location(at))
            for at, argnum in enumerate(self.argnums)
        ]
        return [*(TensorName(each.name, "result", where) for each in results), *gradients]

    def backward_location(self, at: int = 0) -> str:
        """`file:line` of what computes the gradient by one of the arguments."""
        return rule_location(self.subject, self.sample.names[self.argnums[at]])


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


def record_copies(
    call: Callable[[list[Any]], Any], flat: Sequence[Any], argnums: Sequence[int]
) -> tuple[list[Any], Any]:
    """Call a function under autograd on copies of its arguments.

    Args:
        call: Takes flat arguments.
        flat: Flat arguments, which stay as they are.
        argnums: The arguments that require a gradient.

    Returns:
        The leaves, and what the call returns.
    """
    leaves, _, returned = record(call, [replica(value) for value in flat], argnums)
    return leaves, returned
