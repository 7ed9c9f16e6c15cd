"""What compiled or exported code gives, beside what the operator itself gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from opsmith.checking.examples import own_dtype
from opsmith.checking.loop import Fault, Loop, OneByOne
from opsmith.checking.mapped_gradients import gradients_of
from opsmith.checking.sample import Sample
from opsmith.checking.stepping import Ran, names_of, places_of
from opsmith.checking.subject import Subject

FOLLOWED = "is followed by autograd"


def faults(
    subject: Subject, sample: Sample, flat: Sequence[Any], eager: Ran, found: Ran, grads: Sequence[Any]
) -> Iterator[tuple[str, str, Fault]]:
    """What is wrong with one call: the name of a result or argument, how messages call it, and the fault.

    Args:
        subject: What is under check.
        sample: The sample.
        flat: Its flat arguments.
        eager: What the operator itself gives.
        found: What is to be held to it.
        grads: The gradient of each result, None for one that is not followed.
    """
    names = names_of(subject, sample, flat)
    if len(found.results) != len(eager.results):
        counts = str(len(found.results)), str(len(eager.results))
        yield names[0] if names else "result", "the number of results", Fault("count", *counts)
        return
    draws = subject.draws
    ours = subject.apply is None and not subject.specification.opaque
    plain = partial(_tensors, subject.plain(sample)) if ours else None
    call = partial(_tensors, partial(subject.call, sample))
    results = _loop(subject, sample, call, flat, plain)
    for position, (name, got, right) in enumerate(zip(names, found.results, eager.results, strict=True)):
        fault = _form(got, right) if draws else results.fault(position, got.unsqueeze(0))
        if fault is not None:
            yield name, f"`{name}`", fault
        elif found.followed[position] != eager.followed[position]:
            words = FOLLOWED, "is not followed by autograd"
            mine, theirs = words if found.followed[position] else reversed(words)
            yield name, f"`{name}`", Fault("graph", mine, theirs)
    if draws or not found.gradients or found.followed != eager.followed:
        return
    places = places_of(subject, sample)
    one = partial(gradients_of, call, places, len(flat))
    surrogate = subject.specification.gradients.surrogate
    instead = None if plain is None or surrogate else partial(gradients_of, plain, places, len(flat))
    gradients = _loop(subject, sample, one, [*flat, *grads], instead)
    for position, (place, got) in enumerate(zip(places, found.gradients, strict=False)):
        fault = gradients.fault(position, got.unsqueeze(0))
        if fault is not None:
            label = sample.labels[place]
            yield label, f"the gradient of `{label}`", fault


def _tensors(function: Callable[..., Any], flat: Sequence[Any]) -> list[Any]:
    """The results that are tensors."""
    return [each for each in function(flat) if each is not None]


def _loop(
    subject: Subject, sample: Sample, function: OneByOne, flat: Sequence[Any], instead: OneByOne | None
) -> Loop:
    """A loop over one example alone: what holds for a batch of one."""
    dtype, truth = own_dtype(sample), subject.has_truth
    return Loop(function, [[*flat]], (), subject.generator(), truth, dtype, instead=instead)


def _form(got: Any, right: Any) -> Fault | None:
    for aspect in ("shape", "dtype"):
        if getattr(got, aspect) != getattr(right, aspect):
            return Fault(aspect, str(getattr(got, aspect)), str(getattr(right, aspect)))
    return None
