"""No side effects: inputs and incoming gradients stay as they were, and running twice gives the same."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.derivative import vjp
from opsmith.checking.difference import unequal
from opsmith.checking.differentiated import differentiated, rule_place
from opsmith.checking.hypotheses import alike
from opsmith.checking.probes import plain_probe
from opsmith.checking.property import Findings, Note, Property, each_sample
from opsmith.checking.report import Failure
from opsmith.checking.sample import Sample, is_inexact, replica
from opsmith.checking.subject import Subject

NAME = "effects"


def run(subject: Subject) -> Findings:
    """Run forward and backward twice, on every device, and compare everything bit by bit."""
    yield from each_sample(NAME, subject, _sample)


def _sample(subject: Subject, sample: Sample) -> Findings:
    for device in subject.devices:
        found = [*_forward(subject, sample, device)]
        yield from found
        if not found and device in subject.devices_with(
            torch.float64
        ):  # a backward runs the forward too, and would only say so again
            yield from _backward(subject, sample, device)


def _forward(subject: Subject, sample: Sample, device: torch.device) -> Findings:
    flat = sample.at(device=device)
    before = [replica(value) for value in flat]
    first = subject.call(sample, flat)
    where = subject.runs_at(flat)
    yield from _untouched(sample, sample.labels, before, flat, "a call", where)
    second = subject.call(sample, sample.at(device=device))
    for one, other, result in zip(first, second, subject.results(sample), strict=True):
        if one is None or other is None:
            continue
        what = f"two calls give different `{result.name}`"
        yield from _steady(subject, sample, result.name, one, other, what, where)


def _backward(subject: Subject, sample: Sample, device: torch.device) -> Findings:
    places = differentiated(subject, sample).places
    if not places:
        return
    probe = plain_probe(subject, sample, subject.call(sample, sample.at(torch.float64)))
    names = [result.gradient_name() for result in subject.results(sample)]
    runs = []
    for _ in range(2):
        flat, grads = sample.at(torch.float64, device), probe.at(torch.float64, device)
        before, before_grads = [replica(value) for value in flat], [replica(grad) for grad in grads]
        runs.append(vjp(partial(subject.call, sample), flat, places, grads) or [None] * len(places))
        where = rule_place(subject, sample.names[places[0]])
        yield from _untouched(sample, sample.labels, before, flat, "a backward", where)
        cause = "mutates-grad-output"
        yield from _untouched(sample, names, before_grads, grads, "a backward", where, cause)
    for place, one, other in zip(places, *runs, strict=True):
        if one is not None and other is not None:
            label, where = sample.labels[place], rule_place(subject, sample.names[place])
            what = f"two backwards give different gradients of `{label}`"
            yield from _steady(subject, sample, label, one, other, what, where)


def _untouched(
    sample: Sample,
    labels: Sequence[str],
    before: Sequence[Any],
    after: Sequence[Any],
    what: str,
    where: str,
    cause: str = "mutates-input",
) -> Findings:
    for label, old, new in zip(labels, before, after, strict=True):
        difference = unequal(new, old) if isinstance(old, Tensor) else None
        if difference is not None:
            message = f"{what} wrote into `{label}`: {difference}; work on a copy, `.clone()`"
            evidence = {"sample": str(sample), **difference.evidence()}
            yield Failure(NAME, label, cause, message, where, evidence)


def _steady(
    subject: Subject, sample: Sample, name: str, one: Tensor, other: Tensor, what: str, where: str
) -> Findings:
    difference = unequal(other, one)
    if difference is None:
        return
    if is_inexact(one) and alike(other, one, torch.finfo(one.dtype).eps ** 0.5):
        yield Note(f"{what}, by rounding alone: a sum whose order changes from run to run does this")
        return
    seeded = " though both drew from the same random state" if subject.specification.random else ""
    yield Failure(
        NAME,
        name,
        "nondeterministic",
        f"{what}{seeded}: {difference}; the second run is shown as wrong, the first as right. Memory that is "
        "read before it is written, or a global that changes, does this",
        where,
        {"sample": str(sample)},
    )


EFFECTS = Property(NAME, "inputs stay as they were, and running twice gives the same", run, varied=True)
