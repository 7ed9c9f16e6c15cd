"""A wrong gradient as the diagnosis looks at it: with its inputs, and with a way to see it on fresh ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from opsmith.checking.derivative import vjp
from opsmith.checking.diagnosis import Observation
from opsmith.checking.layouts import PLAIN, incoming
from opsmith.checking.probes import Probe
from opsmith.checking.property import refuse_own
from opsmith.checking.redrawing import redrawn
from opsmith.checking.right_gradient import RightGradient
from opsmith.checking.sample import Sample

if TYPE_CHECKING:
    from opsmith.checking.attempts import Attempt


def observe(right: RightGradient, attempt: Attempt) -> Observation:
    """What is known of a wrong gradient.

    Args:
        right: The right gradients of its sample.
        attempt: The backward that it came from.
    """
    assert attempt.expected is not None
    return _observation(
        right, attempt.place, attempt.subset, attempt.probe, attempt.dtype, attempt.got, attempt.expected
    )


def _observation(
    right: RightGradient,
    place: int,
    subset: tuple[int, ...],
    probe: Probe,
    dtype: torch.dtype,
    got: Tensor | None,
    expected: Tensor,
) -> Observation:
    subject, sample = right.subject, right.sample
    flat, grads = sample.at(dtype), probe.at(dtype, torch.device("cpu"))
    with torch.no_grad():
        results = subject.call(sample, sample.at(dtype))
    names = [result.name for result in subject.results(sample)]

    def backward(given: Sequence[Tensor | None]) -> Tensor | None:
        found = vjp(partial(subject.call, sample), sample.at(dtype), subset, given)
        return None if found is None else found[subset.index(place)]

    def rightly(given: Sequence[Tensor | None]) -> Tensor:
        return right.gradient(place, replace(probe, name="given", grads=tuple(given)))

    def others() -> dict[str, tuple[Tensor | None, Tensor]]:
        found = vjp(partial(subject.call, sample), sample.at(dtype), right.places, grads)
        mine = found or [None] * len(right.places)
        return {
            sample.labels[other]: (gradient, right.gradient(other, probe))
            for other, gradient in zip(right.places, mine, strict=True)
            if other != place
        }

    def again(seed: int) -> Observation | None:
        fresh = redrawn(subject, sample, seed)
        return None if fresh is None else _on(right, fresh, place, subset, probe, dtype, seed)

    return Observation(
        got,
        expected,
        what=f"the gradient of `{sample.labels[place]}`",
        about=sample.labels[place],
        inputs=dict(zip(sample.labels, flat, strict=True)),
        grads=dict(zip(names, grads, strict=True)),
        results=dict(zip(names, results, strict=True)),
        others=others,
        backward=backward,
        right=rightly,
        again=again,
        fresh=subject.effort.fresh,
    )


def _on(
    right: RightGradient,
    fresh: Sample,
    place: int,
    subset: tuple[int, ...],
    probe: Probe,
    dtype: torch.dtype,
    seed: int,
) -> Observation | None:
    """The same gradient on another sample; None where it cannot be told there."""
    subject = right.subject
    generator = torch.Generator().manual_seed(seed)
    other = RightGradient(subject, fresh, right.places)
    try:
        with torch.no_grad():
            results = subject.call(fresh, fresh.at(torch.float64))
        grads = tuple(
            None if old is None else incoming(result, PLAIN, generator)
            for old, result in zip(probe.grads, results, strict=True)
        )
        drawn = Probe(PLAIN, grads, True)
        found = vjp(
            partial(subject.call, fresh), fresh.at(dtype), subset, drawn.at(dtype, torch.device("cpu"))
        )
        got = None if found is None else found[subset.index(place)]
        return _observation(other, place, subset, drawn, dtype, got, other.gradient(place, drawn))
    except Exception as error:
        refuse_own(error)
        return None  # what it does not take says nothing about what it does
