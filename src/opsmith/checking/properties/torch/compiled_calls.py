"""Compiled calls: several calls of an operator as one function to compile or export, and its runs."""

from __future__ import annotations

import itertools
import time
import types
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from opsmith import errors
from opsmith.checking.calls import differentiated
from opsmith.checking.exceptions import Raised, attempt
from opsmith.checking.numerics.autodiff import differentiate, has_gradient
from opsmith.checking.properties.torch.forms import (
    Examples,
    Fault,
    Form,
    form_fault,
    gradients_by,
    results_of,
)
from opsmith.checking.property import Finding, Findings, Note, of_exception
from opsmith.checking.report import Failure
from opsmith.checking.run import record_copies
from opsmith.checking.samples.grad_outputs import random_grad_outputs
from opsmith.checking.samples.sample import Sample
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.checking.subject import Subject
from opsmith.core.cached_property import cached_property
from opsmith.core.call_arguments import tensors_in
from opsmith.core.collector import importing_without_garbage_collection

_numbers = itertools.count()

GRAPH = {True: "a graph of autograd", False: "no graph of autograd"}
"""Words for a result that autograd follows, and for one that it does not."""


@dataclass(frozen=True)
class PlainCall:
    """A call to be traced, and what it gives where nothing traces it."""

    subject: Subject
    sample: Sample

    @cached_property
    def flat(self) -> list[Any]:
        """Its flat arguments."""
        return self.sample.at()

    @cached_property
    def argnums(self) -> tuple[int, ...]:
        """The arguments to differentiate by."""
        return differentiated(self.subject, self.sample).argnums

    @cached_property
    def recorded(self) -> list[Any]:
        """The results with their graphs."""
        found: list[Any] = record_copies(partial(self.subject.call, self.sample), self.flat, self.argnums)[1]
        return found

    @cached_property
    def grads(self) -> list[Tensor | None]:
        """A random gradient for each result that autograd follows."""
        follows = [*map(has_gradient, self.recorded)]
        return random_grad_outputs(self.recorded, follows, self.subject.generator())

    @cached_property
    def results(self) -> Examples:
        """The right results."""
        return Examples(self.subject, self.sample, [self.flat])

    @cached_property
    def gradients(self) -> Examples:
        """The right gradients."""
        return Examples(self.subject, self.sample, [[*self.flat, *self.grads]], argnums=self.argnums)

    def run(self, *, backward: bool) -> list[Tensor | None]:
        """Compute what it gives, once."""
        return [*self.recorded, *self.results.expected, *(self.gradients.expected if backward else ())]

    def arguments(self, flat: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call, as `step_of` makes it."""
        kind, schema = self.subject.kind, self.sample.flattening.schema
        values = self.sample.flattening.pack(flat)
        if kind.applied:
            return tuple(self.subject.specification.origin.spread(values)), {}
        args, kwargs = schema.dispatched(values) if kind.in_library else schema.split(values)
        return tuple(args), dict(kwargs)

    def results_in(self, returned: Any) -> list[Any]:
        """The results of the call in another form, None among them where this call gives it."""
        found = [*tensors_inside(returned)]
        present, rest = [each is not None for each in self.recorded], iter(found)
        return found if len(found) != sum(present) else [next(rest) if each else None for each in present]


class TracedCall(NamedTuple):
    """What a call gives in another form.

    Args:
        results: Its results.
        gradients: The gradients by the differentiated arguments; None where no backward was run.
    """

    results: Sequence[Any]
    gradients: Sequence[Tensor] | None = None


def step_of(subject: Subject) -> Callable[[Any], Any]:
    """A function that makes several calls: it takes their arguments, and returns the results of each.

    Its code object is new each time, since torch limits the number of times that it compiles one.
    """
    own = subject.kind.applied or subject.kind.in_library
    target: Any = subject.specification.origin.subject if own else subject.operator
    if subject.kind.applied:

        def step(calls: Any) -> Any:
            return [target.apply(*args) for args, _ in calls]

    else:
        if subject.kind.in_library and subject.in_place is not None:
            target = subject.apply  # on copies

        def step(calls: Any) -> Any:
            return [target(*args, **kwargs) for args, kwargs in calls]

    code = step.__code__.replace(co_name=f"step_{next(_numbers)}")
    return types.FunctionType(code, step.__globals__, code.co_name, None, step.__closure__)


def run_step(step: Callable[[Any], Any], calls: Sequence[PlainCall]) -> list[TracedCall]:
    """Run a step, compiled or not, and one backward through all its results."""
    begins = [*itertools.accumulate((len(call.flat) for call in calls), initial=0)]
    pairs = [*zip(begins, calls, strict=False)]
    argnums = [begin + argnum for begin, call in pairs for argnum in call.argnums]

    def every(given: list[Any]) -> Any:
        return step([call.arguments(given[begin:][: len(call.flat)]) for begin, call in pairs])

    with calls[0].subject.seeded():
        leaves, returned = record_copies(every, [value for call in calls for value in call.flat], argnums)
    results = [call.results_in(each) for call, each in zip(calls, returned, strict=True)]
    if any(len(each) != len(call.grads) for call, each in zip(calls, results, strict=True)):
        return [TracedCall(each) for each in results]
    inputs, grads = [leaves[argnum] for argnum in argnums], [grad for call in calls for grad in call.grads]
    found = differentiate([value for each in results for value in each], inputs, grads)
    rest = (torch.zeros_like(one) if grad is None else grad for one, grad in zip(inputs, found, strict=True))
    gradients = [[*itertools.islice(rest, len(call.argnums))] for call in calls]
    return [TracedCall(*each) for each in zip(results, gradients, strict=True)]


def tensors_inside(value: Any) -> Iterator[Tensor]:
    """The tensors in a returned value, nested in any way."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_inside(each)


def other_sizes(call: PlainCall) -> PlainCall | None:
    """A call with an input that was derived from the sample and has other sizes, none of them 0 or 1."""
    for other in call.subject.samples:
        if other.origin.startswith(f"sample {call.sample.position} ") and _resized(call.sample, other):
            return PlainCall(call.subject, other)
    return None


def _resized(sample: Sample, other: Sample) -> bool:
    def apart_from_sizes(flat: Sequence[Any]) -> list[Any]:
        return [
            (value.dim(), value.dtype) if isinstance(value, Tensor) else (type(value), value)
            for value in flat
        ]

    if other.flattening.lengths != sample.flattening.lengths:
        return False
    if apart_from_sizes(sample.flat) != apart_from_sizes(other.flat):
        return False
    tensors = zip(tensors_in([*sample.flat]), tensors_in([*other.flat]), strict=True)
    pairs = [pair for one, two in tensors for pair in zip(one.shape, two.shape, strict=True)]
    changed = [min(pair) for pair in pairs if pair[0] != pair[1]]
    return bool(changed) and min(changed) > 1  # torch specializes on sizes 0 and 1


class Tracing:
    """A tool of torch that traces calls of an operator.

    Attributes:
        property: Name of the property.
        done: Word for a call that it has traced.
        words: Words in messages before an output of that.
        takes_tensors: True if it takes no call without a tensor.
        backward: True if it traces the backward, too.
        ran: True if it has traced any.
    """

    property: str
    done: str
    words: str
    takes_tensors = ran = False
    backward = True

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    def calls(self, generators: str) -> Generator[Finding, None, list[PlainCall]]:
        """Select the calls of the author's samples that do not raise where nothing traces them.

        Args:
            generators: Reason to leave out a sample with a generator.
        """
        found: list[PlainCall] = []
        for sample in self.subject.samples:
            if sample.origin or (self.takes_tensors and not tensors_in([*sample.flat])):
                continue
            if any(isinstance(value, torch.Generator) for value in sample.flat):
                yield Note(f"a sample with a generator was left out: {generators}")
                continue
            call = PlainCall(self.subject, sample)
            raised = attempt(partial(call.run, backward=self.backward))
            if isinstance(raised, Raised):
                words = f"{sample} was left out, since it raises without `torch.{self.property}`"
                see = ": see `gradient`" if self.backward else ""
                yield Note(f"{words}: {reason_of(raised.error)}{see}")
            else:
                found.append(call)
        return found

    def alone(
        self,
        check: Callable[[Sequence[PlainCall]], Findings],
        calls: Sequence[PlainCall],
        error: Exception,
    ) -> Findings:
        """Check each of several calls alone, to find the one that raises; report that of one alone."""
        if len(calls) == 1:
            yield from self.refused(calls, error)
            return
        for one in calls:
            yield from check([one])

    def refused(self, calls: Sequence[PlainCall], *errors: Exception) -> Findings:
        """Note a refusal by torch or opsmith, and report any other exception; others may have led to it."""
        reason = refused(self.subject, *errors)
        if reason is not None:
            samples = ", ".join(f"sample {call.sample.position}" for call in calls)
            yield Note(f"{samples} cannot be {self.done}: {reason}")
            return
        kind, location = type(errors[0]).__name__, self.subject.specification.where
        message = f"{self} raises where a call does not: {kind}: {reason_of(errors[0])}"
        evidence = of_exception(errors[0], str(calls[0].sample))
        yield Failure(self.property, None, "raises", message, location, evidence)

    def judged(self, calls: Sequence[PlainCall], found: Sequence[TracedCall]) -> Findings:
        """Compare results and gradients of traced calls with those of plain ones."""
        subject, where = self.subject, self.subject.specification.where
        for call, traced in zip(calls, found, strict=True):
            notes: list[Note] = []
            evidence = {"sample": str(call.sample)}
            form = partial(Form, self.property, self.words, "is another than without", evidence=evidence)
            results = form(results_of(subject, call.sample, where), partial(self._fault, call, traced, notes))
            yield from results.failures(traced.results, set())
            yield from notes
            alike = [*map(has_gradient, traced.results)] == [*map(has_gradient, call.recorded)]
            if alike and traced.gradients and not subject.draws:
                outputs = gradients_by(subject, call.sample, call.argnums, where)
                yield from form(outputs, call.gradients.fault).failures(traced.gradients, set())

    def _fault(
        self, call: PlainCall, traced: TracedCall, notes: list[Note], position: int, got: Any
    ) -> Fault | None:
        """The fault of a result: of its form alone if it is drawn, or that autograd does not follow it."""
        right = call.recorded[position]
        fault = form_fault(got, right) if self.subject.draws else call.results.fault(position, got)
        if fault is not None or traced.gradients is None or has_gradient(got) == has_gradient(right):
            return fault
        words = GRAPH[has_gradient(got)], GRAPH[has_gradient(right)]
        if not has_gradient(got) and self.subject.torch_operator is not None:
            return Fault("graph", *words)
        name = self.subject.results(call.sample)[position].name
        notes.append(Note(f"{self.done}, `{name}` has {words[0]}; without, it has {words[1]}"))
        return None


def refused(subject: Subject, error: BaseException, *before: BaseException) -> str | None:
    """The reason for a refusal by torch or opsmith, by an error or those before it; None for a fault."""
    for each in (cause for one in (error, *before) for cause in chain(one)):
        if isinstance(each, errors.MissingFakeError):
            return f"there is no fake kernel: {each.hint}"
        if isinstance(each, errors.TransformError) or "TransformError" in str(each):
            return reason_of(each)
        if type(each).__name__ in ("InternalTorchDynamoError", "InvalidCxxCompiler", "NotImplementedError"):
            return f"{type(each).__name__}: {reason_of(each)}"
    if _of_symbol(error):  # with symbolic sizes, integer arguments are symbols too
        return f"it does not take a symbol for a whole number: {reason_of(error)}"
    if subject.lacks("fake"):
        return f"there is no fake kernel: {reason_of(error)}"
    if subject.torch_operator is None:  # torch supports compiling few Function classes
        return f"{type(error).__name__}: {reason_of(error)}"
    return None


def _of_symbol(error: BaseException) -> bool:
    """True if the error is about a symbolic integer; lines with a schema, which may name it, are ignored."""
    return any("SymInt" in line and "::" not in line for line in str(error).splitlines())


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def reason_of(error: BaseException) -> str:
    """The lines of torch's error that give the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    explanations = [line for line in lines if line.startswith("Explanation: ")]
    return " ".join([lines[0], *explanations[:1]]) if lines else type(error).__name__


def load_compiler() -> float:
    """Load the parts of torch that the properties need, and return the seconds that it took.

    Fake tensors, modes and `torch.func.vjp` load torch's compiler, a backward its symbolic sizes, and forward
    mode its rules. This takes a second or two once in a process, and counts for no property.

    Example:
        >>> isinstance(load_compiler(), float)
        True
    """
    start = time.perf_counter()
    with without_warnings(), importing_without_garbage_collection(), forward_ad.dual_level():
        torch.compiler.disable(_nothing)
        forward_ad.make_dual(torch.zeros(1), torch.ones(1))
    return time.perf_counter() - start


def _nothing() -> None:
    """Function that is never compiled."""
