"""A backward is linear in what comes in: torch adds up gradients before and after an operator."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.derivative import vjp
from opsmith.checking.differentiated import differentiated, rule_place
from opsmith.checking.linear import WHY, Grads, Known, departure
from opsmith.checking.mistakes import refuse_own
from opsmith.checking.probes import plain_probe
from opsmith.checking.property import Findings, Property, Skipped, each_sample
from opsmith.checking.report import Failure
from opsmith.checking.sample import Sample
from opsmith.checking.subject import Subject

NAME = "linearity"


def run(subject: Subject) -> Findings:
    """Hold the gradient of every input to a u + b v, and to small and large ones."""
    if subject.specification.gradients.surrogate:
        yield Skipped("the gradients are surrogates; the property `surrogate` holds them to linearity")
    elif not subject.linear:
        yield Skipped("it is declared not to be linear in the incoming gradient")
    else:
        compared: list[bool] = []
        yield from each_sample(NAME, subject, partial(_sample, compared=compared))
        if not any(compared):
            yield NOT_COMPARED if compared else Skipped("there is nothing to differentiate")


NOT_COMPARED = Skipped("no backward gives numbers to compare: `gradient` says what is wrong, if anything is")


def _sample(subject: Subject, sample: Sample, compared: list[bool]) -> Findings:
    """Look at every input, and add to `compared` for each whether it has something to compare."""
    places = differentiated(subject, sample).places
    if not places:
        return
    with torch.no_grad():
        results = subject.call(sample, sample.at(torch.float64))
    first = list(plain_probe(subject, sample, results).grads)
    for place in places:
        found = _linear(subject, sample, place, first)
        compared.append(found is not NOT_COMPARED)
        if isinstance(found, Failure):
            yield found


def _linear(subject: Subject, sample: Sample, place: int, first: Grads) -> Failure | Skipped | None:
    def backward(grads: Grads) -> Tensor | None:
        found = vjp(partial(subject.call, sample), sample.at(torch.float64), (place,), grads)
        return found[0] if found else None

    generator = subject.generator(1)
    second = [
        None if each is None else torch.randn(each.shape, generator=generator, dtype=each.dtype)
        for each in first
    ]
    try:
        u, v = backward(first), backward(second)
    except Exception as error:
        refuse_own(error)
        return NOT_COMPARED  # `gradient` says so
    if u is None or v is None or not u.numel() or not bool((u.isfinite() & v.isfinite()).all()):
        return NOT_COMPARED  # so it does of what is missing or no number
    label = sample.labels[place]
    where = rule_place(subject, sample.names[place])
    evidence: dict[str, Any] = {"sample": f"{sample} in float64"}
    if torch.equal(u, v) and bool(u.any()):
        message = (
            f"the gradient of `{label}` is the same, to the bit, for two incoming gradients that have "
            "nothing in common: multiply by what comes in"
        )
        return Failure(NAME, label, "ignores-grad-output", message, where, evidence)
    found = departure(backward, Known(first, u), Known(second, v))
    if found is None:
        return None
    words, difference = found
    message = f"the gradient of `{label}` is not linear in the incoming one: for {words}, {difference}; {WHY}"
    return Failure(NAME, label, "nonlinear-grad", message, where, {**evidence, **difference.evidence()})


LINEARITY = Property(NAME, "the gradient is linear in the incoming one, and depends on it", run, varied=True)
