"""Calls of an operator as one plain function of tensors, which can be compiled, and one run of it."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.derivative import dense, with_gradient
from opsmith.checking.differentiated import differentiated
from opsmith.checking.followed import called
from opsmith.checking.layouts import incoming
from opsmith.checking.sample import Sample
from opsmith.checking.subject import Subject

Grads = Sequence[Sequence[Tensor | None]]

_numbers = itertools.count()


@dataclass(frozen=True)
class Ran:
    """What one call gave.

    Args:
        results: Its results, detached.
        followed: Which of them autograd followed.
        gradients: The gradients by the differentiated arguments, zeros where autograd has none.
    """

    results: tuple[Tensor, ...]
    followed: tuple[bool, ...]
    gradients: tuple[Tensor, ...]

    def like(self, results: tuple[Tensor, ...]) -> Ran:
        """Other results of the same call, of which nothing is known of autograd."""
        return Ran(results, self.followed, ())


def step_of(subject: Subject) -> Callable[[Any], Any]:
    """A function that makes several calls: it takes their arguments, and returns what each returns.

    Its code is new each time: torch compiles one code a few times only, for whatever it is called with.
    """
    adopted = subject.specification.adopted
    if subject.apply is not None and adopted is not None:
        target: Any = adopted.function_class

        def step(calls: Any) -> Any:
            return [target.apply(*args) for args, _ in calls]

    else:
        target = subject.torch_operator if subject.foreign else subject.operator

        def step(calls: Any) -> Any:
            return [target(*args, **kwargs) for args, kwargs in calls]

    code = step.__code__.replace(co_name=f"step_{next(_numbers)}")
    return types.FunctionType(code, step.__globals__, code.co_name, None, step.__closure__)


def call_of(subject: Subject, sample: Sample, flat: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one call, as `step_of` makes it."""
    schema, values = sample.flattening.schema, sample.flattening.pack(flat)
    adopted = subject.specification.adopted
    if subject.apply is not None and adopted is not None:
        return tuple(adopted.spread(values)), {}
    args, kwargs = schema.dispatched(values) if subject.foreign else schema.split(values)
    return tuple(args), dict(kwargs)


def places_of(subject: Subject, sample: Sample) -> tuple[int, ...]:
    """The arguments that a sample is differentiated by."""
    return differentiated(subject, sample).places


def run_step(
    subject: Subject,
    step: Callable[[Any], Any],
    flats: Sequence[tuple[Sample, Sequence[Any]]],
    grads: Grads | None = None,
) -> list[Ran]:
    """Run a step, and a backward through all that it gives.

    Args:
        subject: What is under check.
        step: As of `step_of`, compiled or not.
        flats: Each sample, and the flat arguments to call it with.
        grads: For each call the gradient of each result, None for one that is not followed; no backward is
            run by default.
    """
    lengths = [len(flat) for _, flat in flats]
    every = [value for _, flat in flats for value in flat]
    places = [
        sum(lengths[:at]) + place
        for at, (sample, _) in enumerate(flats)
        for place in places_of(subject, sample)
    ]

    def call(given: list[Any]) -> Any:
        rows = _apart(given, lengths)
        return step([call_of(subject, sample, row) for (sample, _), row in zip(flats, rows, strict=True)])

    with subject.seeded():
        found, returned = called(call, every, places)
    leaves = _apart(found, lengths)
    answers = []
    results = [tuple(tensors_inside(each)) for each in returned]
    followed = [tuple(map(with_gradient, each)) for each in results]
    wanted = [
        [flat[place] for place in places_of(subject, s)] for (s, _), flat in zip(flats, leaves, strict=True)
    ]
    gradients = _backward(results, wanted, grads) if grads is not None else [()] * len(results)
    for each, follows, mine in zip(results, followed, gradients, strict=True):
        answers.append(Ran(tuple(value.detach() for value in each), follows, tuple(mine)))
    return answers


def _apart(values: Sequence[Any], lengths: Sequence[int]) -> list[list[Any]]:
    """Values in rows of these lengths."""
    rest = iter(values)
    return [list(itertools.islice(rest, length)) for length in lengths]


def _backward(
    results: Sequence[Sequence[Tensor]], wanted: Sequence[Sequence[Tensor]], grads: Grads
) -> list[list[Tensor]]:
    """One backward through all calls, whose gradients are given out to each."""
    pairs = [
        (value, grad)
        for each, given in zip(results, grads, strict=True)
        for value, grad in zip(each, given, strict=False)
        if grad is not None and with_gradient(value)
    ]
    inputs = [value for each in wanted for value in each]
    if not pairs or not inputs:
        return [[] for _ in results]
    every = torch.autograd.grad(
        [value for value, _ in pairs], inputs, [grad for _, grad in pairs], allow_unused=True
    )
    found = iter(dense(every))
    return [
        [torch.zeros_like(value) if grad is None else grad for value, grad in zip(each, found, strict=False)]
        for each in wanted
    ]


def grads_for(subject: Subject, runs: Sequence[Ran]) -> Grads:
    """Random gradients for the results of each call; None for those that are not followed."""
    generator = subject.generator()
    return [
        [
            incoming(value, generator) if followed else None
            for value, followed in zip(ran.results, ran.followed, strict=True)
        ]
        for ran in runs
    ]


def tensors_inside(value: Any) -> Iterator[Tensor]:
    """The tensors in what a call returns, however they lie."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_inside(each)


def names_of(subject: Subject, sample: Sample, flat: Sequence[Any]) -> list[str]:
    """The names of the results that are tensors, in the order in which a step gives them."""
    with torch.no_grad():
        values = subject.call(sample, flat)
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
                return False  # 0 and 1 are always compiled for themselves
            changed = changed or before != after
    return changed
