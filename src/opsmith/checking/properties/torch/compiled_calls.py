"""Compiled calls: several calls of an operator as one function to compile or export, and its runs."""

from __future__ import annotations

import itertools
import time
import types
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from opsmith import errors
from opsmith.checking.calls import computed_in, differentiated, record_copies
from opsmith.checking.exceptions import refuse_own
from opsmith.checking.numerics.autodiff import differentiate, has_gradient
from opsmith.checking.numerics.compare import metadata_difference
from opsmith.checking.properties.torch.batched_gradients import gradients_of
from opsmith.checking.properties.torch.mapping import ExampleLoop, OneByOne, ResultFault
from opsmith.checking.property import Finding, Note
from opsmith.checking.samples.batches import own_dtype, replicas
from opsmith.checking.samples.grad_outputs import random_grad_outputs
from opsmith.checking.samples.sample import Sample
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.checking.subject import Subject
from opsmith.core.collector import importing_without_garbage_collection

Flats = list[tuple[Sample, list[Any]]]
"""Samples, each with its flat arguments."""
Grads = Sequence[Sequence[Tensor | None]]

_numbers = itertools.count()


@dataclass(frozen=True)
class StepValues:
    """Results and gradients of one call of a step.

    Args:
        results: Its results, detached.
        recorded: For each result, True if autograd recorded it.
        gradients: The gradients by the differentiated arguments, zeros where autograd has none.
    """

    results: tuple[Tensor, ...]
    recorded: tuple[bool, ...]
    gradients: tuple[Tensor, ...]

    def like(self, results: tuple[Tensor, ...]) -> StepValues:
        """Other results of the same call, without gradients."""
        return StepValues(results, self.recorded, ())


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


def call_of(subject: Subject, sample: Sample, flat: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one call, as `step_of` makes it."""
    schema, values = sample.flattening.schema, sample.flattening.pack(flat)
    if subject.kind.applied:
        return tuple(subject.specification.origin.spread(values)), {}
    args, kwargs = schema.dispatched(values) if subject.kind.in_library else schema.split(values)
    return tuple(args), dict(kwargs)


def eager_calls(
    subject: Subject,
    generators: str,
    raising: Callable[[Sample, Exception], Finding],
    is_usable: Callable[[Sample], bool] = lambda sample: True,
) -> Generator[Finding, None, Flats]:
    """Select the author's samples that the operator runs, and report the others.

    Args:
        subject: The subject of the check.
        generators: Reason to leave out a sample with a generator.
        raising: Makes the finding for a sample on which the operator raises.
        is_usable: Returns False for a sample to leave out without a call and without a note.
    """
    flats: Flats = []
    for sample in subject.samples:
        if sample.origin or not is_usable(sample):
            continue
        if any(isinstance(value, torch.Generator) for value in sample.flat):
            yield Note(f"a sample with a generator was left out: {generators}")
            continue
        try:
            subject.call(sample, sample.at())
        except Exception as error:
            refuse_own(error)
            yield raising(sample, error)
        else:
            flats.append((sample, sample.at()))
    return flats


def run_step(
    subject: Subject,
    step: Callable[[Any], Any],
    flats: Sequence[tuple[Sample, Sequence[Any]]],
    grads: Grads | None = None,
) -> list[StepValues]:
    """Run a step, and a backward through all its results.

    Args:
        subject: The subject of the check.
        step: As of `step_of`, compiled or not.
        flats: Each sample, and the flat arguments to call it with.
        grads: For each call the gradient of each result, None for one that is not recorded; no backward is
            run by default.
    """
    lengths = [len(flat) for _, flat in flats]
    every = [value for _, flat in flats for value in flat]
    argnums = [
        sum(lengths[:at]) + argnum
        for at, (sample, _) in enumerate(flats)
        for argnum in differentiated(subject, sample).argnums
    ]

    def call(given: list[Any]) -> Any:
        rows = _apart(given, lengths)
        return step([call_of(subject, sample, row) for (sample, _), row in zip(flats, rows, strict=True)])

    with subject.seeded():
        found, returned = record_copies(call, every, argnums)
    leaves = _apart(found, lengths)
    answers = []
    results = [tuple(tensors_inside(each)) for each in returned]
    recorded = [tuple(map(has_gradient, each)) for each in results]
    wanted = [
        [flat[argnum] for argnum in differentiated(subject, s).argnums]
        for (s, _), flat in zip(flats, leaves, strict=True)
    ]
    gradients = _backward(results, wanted, grads) if grads is not None else [()] * len(results)
    for each, follows, actual in zip(results, recorded, gradients, strict=True):
        answers.append(StepValues(tuple(value.detach() for value in each), follows, tuple(actual)))
    return answers


def _apart(values: Sequence[Any], lengths: Sequence[int]) -> list[list[Any]]:
    """Values in rows of these lengths."""
    rest = iter(values)
    return [list(itertools.islice(rest, length)) for length in lengths]


def _backward(
    results: Sequence[Sequence[Tensor]], wanted: Sequence[Sequence[Tensor]], grads: Grads
) -> list[list[Tensor]]:
    """Run one backward through all calls, and return the gradients of each."""
    pairs = [
        (value, grad)
        for each, given in zip(results, grads, strict=True)
        for value, grad in zip(each, given, strict=False)
        if grad is not None and has_gradient(value)
    ]
    inputs = [value for each in wanted for value in each]
    if not pairs or not inputs:
        return [[] for _ in results]
    outputs, grad_outputs = zip(*pairs, strict=True)
    found = iter(differentiate(outputs, inputs, grad_outputs))
    return [
        [torch.zeros_like(value) if grad is None else grad for value, grad in zip(each, found, strict=False)]
        for each in wanted
    ]


def grads_for(subject: Subject, runs: Sequence[StepValues]) -> Grads:
    """Random gradients for the results of each call; None for those that autograd does not record."""
    generator = subject.generator()
    return [random_grad_outputs(ran.results, ran.recorded, generator) for ran in runs]


def tensors_inside(value: Any) -> Iterator[Tensor]:
    """The tensors in a returned value, nested in any way."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_inside(each)


def names_of(subject: Subject, sample: Sample, flat: Sequence[Any]) -> list[str]:
    """The names of the results that are tensors, in the order of a step."""
    with torch.no_grad():
        values = subject.call(sample, replicas(flat))
    pairs = zip(subject.results(sample), values, strict=True)
    return [result.name for result, value in pairs if isinstance(value, Tensor)]


def other_sizes(subject: Subject, sample: Sample) -> Sample | None:
    """An input that was derived from a sample and has other sizes than it, none of them 0 or 1."""
    for other in subject.samples:
        if other.origin.startswith(f"sample {sample.position} ") and _resized(sample, other):
            return other
    return None


def _resized(sample: Sample, other: Sample) -> bool:
    if other.flattening.lengths != sample.flattening.lengths or len(other.flat) != len(sample.flat):
        return False
    changed = False
    for one, two in zip(sample.flat, other.flat, strict=True):
        if not isinstance(one, Tensor) or not isinstance(two, Tensor):
            if type(one) is not type(two) or (not isinstance(one, Tensor) and one != two):
                return False
            continue
        if one.dim() != two.dim() or one.dtype != two.dtype:
            return False
        for before, after in zip(one.shape, two.shape, strict=True):
            if before != after and min(before, after) < 2:
                return False  # torch specializes on sizes 0 and 1
            changed = changed or before != after
    return changed


RECORDED = "is recorded by autograd"


def faults(
    subject: Subject,
    sample: Sample,
    flat: Sequence[Any],
    eager: StepValues,
    found: StepValues,
    grads: Sequence[Any],
) -> Iterator[tuple[str, str, ResultFault]]:
    """Yield the faults of one call: the name of a result or argument, its words in messages, and the fault.

    Args:
        subject: The subject of the check.
        sample: The sample.
        flat: Its flat arguments.
        eager: Values of the operator itself.
        found: Values to compare with them.
        grads: The gradient of each result, None for one that is not recorded.
    """
    names = names_of(subject, sample, flat)
    if len(found.results) != len(eager.results):
        counts = str(len(found.results)), str(len(eager.results))
        yield names[0] if names else "result", "the number of results", ResultFault("count", *counts)
        return
    draws = subject.draws
    ours = subject.apply is None and not subject.specification.opaque
    plain = partial(_tensors, subject.plain(sample)) if ours else None
    call = partial(_tensors, partial(subject.call, sample))
    results = _loop(subject, sample, call, flat, plain)
    for position, (name, got, right) in enumerate(zip(names, found.results, eager.results, strict=True)):
        if draws:
            difference = metadata_difference(got, right, strides=False)
            fault = None if difference is None else ResultFault(*difference)
        else:
            fault = results.fault(position, got.unsqueeze(0))
        if fault is not None:
            yield name, f"`{name}`", fault
        elif found.recorded[position] != eager.recorded[position]:
            words = RECORDED, "is not recorded by autograd"
            actual, wanted = words if found.recorded[position] else reversed(words)
            yield name, f"`{name}`", ResultFault("graph", actual, wanted)
    if draws or not found.gradients or found.recorded != eager.recorded:
        return
    argnums = differentiated(subject, sample).argnums
    one = partial(gradients_of, call, argnums, len(flat))
    surrogate = subject.specification.gradients.surrogate
    instead = None if plain is None or surrogate else partial(gradients_of, plain, argnums, len(flat))
    gradients = _loop(subject, sample, one, [*flat, *grads], instead)
    for position, (argnum, got) in enumerate(zip(argnums, found.gradients, strict=False)):
        fault = gradients.fault(position, got.unsqueeze(0))
        if fault is not None:
            label = sample.labels[argnum]
            yield label, f"the gradient of `{label}`", fault


def _tensors(function: Callable[..., Any], flat: Sequence[Any]) -> list[Any]:
    """The results that are tensors."""
    return [each for each in function(flat) if each is not None]


def _loop(
    subject: Subject, sample: Sample, function: OneByOne, flat: Sequence[Any], instead: OneByOne | None
) -> ExampleLoop:
    """An `ExampleLoop` over one example."""
    dtype, truth = own_dtype(sample), subject.has_truth
    known = partial(computed_in, subject, sample)
    return ExampleLoop(
        function, [[*flat]], (), subject.generator(), truth, dtype, instead=instead, computed_in=known
    )


def refused(subject: Subject, error: BaseException) -> str | None:
    """The reason for a refusal by torch or opsmith; None for a fault."""
    for each in chain(error):
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
