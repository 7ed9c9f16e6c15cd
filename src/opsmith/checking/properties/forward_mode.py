"""Forward mode is right: tangents against finite differences, and against the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.case import named
from opsmith.checking.causes import UNKNOWN
from opsmith.checking.derivative import vjp
from opsmith.checking.diagnosis import Observation, diagnose
from opsmith.checking.diagnosis.comparable import alike
from opsmith.checking.differentiated import rule_place
from opsmith.checking.differentiating import each_subset
from opsmith.checking.forward_derivative import Tangents, weighed
from opsmith.checking.numerical_gradient import numerical_gradient
from opsmith.checking.packed import coordinates
from opsmith.checking.property import Findings, Note, Property, Skipped
from opsmith.checking.report import Failure
from opsmith.checking.sample import Sample
from opsmith.checking.second_derivative import DIRECTIONS, SHARE, Numbers
from opsmith.checking.subject import Subject
from opsmith.core.formula import Formula

NAME = "forward_mode"


def run(subject: Subject) -> Findings:
    """Take the tangents of every sample, by all inputs together and by each alone."""
    yield from each_subset(NAME, subject, _look)


def _look(subject: Subject, sample: Sample, places: tuple[int, ...], right: tuple[int, ...]) -> Findings:
    for device in subject.devices_with(torch.float64):
        tangents = Tangents(subject, sample, places, device)
        if not any(weight is not None for weight in tangents.weights[0]):
            continue
        if right:
            yield from _against_all(tangents, Tangents(subject, sample, right, device))
            continue
        got = tangents.by_dual_numbers(tangents.direction)
        found = [*_against_differences(tangents, got)]
        yield from found
        if not any(isinstance(each, Failure) for each in found) and subject.specification.tangents.rules:
            yield from _second_order(tangents)


def _against_all(tangents: Tangents, together: Tangents) -> Findings:
    """The tangents by one input alone, beside those where every input has one, and the others' are zero."""
    subject, sample = tangents.subject, tangents.sample
    pieces = together.direction.split(together.packed.sizes)
    (place,) = tangents.places
    alone = pieces[together.places.index(place)]
    masked = [piece if p == place else 0 * piece for p, piece in zip(together.places, pieces, strict=True)]
    expected = together.by_dual_numbers(torch.cat(masked))
    for result, mine, right in zip(
        subject.results(sample), tangents.by_dual_numbers(alone), expected, strict=True
    ):
        like = mine if right is None else right
        if like is None:
            continue
        got, other = (torch.zeros_like(like) if each is None else each for each in (mine, right))
        if alike(got, other, AGREE):
            continue
        label = sample.labels[place]
        message = (
            f"the tangent of `{result.name}` by `{label}` is another one where `{label}` alone has a tangent "
            f"than where every input has one: they differ by {float((got - other).abs().max()):.3g}"
        )
        where = _rule(subject) or rule_place(subject, sample.names[place])
        evidence = {"sample": named(sample, torch.float64, tangents.device)}
        yield Failure(NAME, label, "forward-mode", message, where, evidence)
        return


def _against_differences(tangents: Tangents, got: Sequence[Tensor | None]) -> Findings:
    if not tangents.packed.row.numel():
        yield Skipped(f"{tangents.sample.brief} has no floating tensor with elements")
        return
    for result, value, tangent in zip(
        tangents.subject.results(tangents.sample), tangents.results, got, strict=True
    ):
        if tangent is not None and tangent.is_complex() and not value.is_complex():
            yield _complex(tangents, result.name, tangent, value)
            return
    untold = 0
    for weights in tangents.weights:
        numbers = tangents.numerically(weights, tangents.direction)
        mine = weighed(got, weights)
        if numbers is None:
            untold += not _as_reverse(tangents, got, weights)
        elif not abs(mine - numbers.value) <= numbers.error:
            if _is_rounding(tangents, got, weights, abs(mine - numbers.value) - numbers.error):
                yield Note(ROUNDED)
                continue
            yield from _alone(tangents) or [_failure(tangents, got, mine, numbers.value)]
            return
    if untold:
        words = (
            f"finite differences cannot tell the tangents of {tangents.sample.brief}, where forward and "
            "reverse mode differ, as they may at a kink"
        )
        yield Note(words) if untold < len(tangents.weights) else Skipped(words)


def _complex(tangents: Tangents, name: str, tangent: Tensor, value: Tensor) -> Failure:
    subject, sample = tangents.subject, tangents.sample
    names = ", ".join(sample.labels[place] for place in tangents.places)
    message = (
        f"the tangent of `{name}` by `{names}` is {tangent.dtype}, and `{name}` is {value.dtype}: return its "
        "real part"
    )
    where = _rule(subject) or rule_place(subject, sample.names[tangents.places[0]])
    return Failure(
        NAME, names, "dtype", message, where, {"sample": named(sample, torch.float64, tangents.device)}
    )


ROUNDED = (
    "the tangents and differences of the forward differ by rounding to float32, as where the backward has a "
    "constant in float64 and the forward the same in float32"
)


def _is_rounding(
    tangents: Tangents, got: Sequence[Tensor | None], weights: Sequence[Tensor | None], off: float
) -> bool:
    """Whether tangents and a forward that its author never meant for autograd differ by such rounding.

    Tangents that are numbers of float32 are another matter: they were computed in it.
    """
    pairs = [(t, w) for t, w in zip(got, weights, strict=True) if t is not None and w is not None]
    rounded = all(
        torch.equal(t.to(NARROWER[t.dtype]).to(t.dtype), t) for t, _ in pairs if t.dtype in NARROWER
    )
    if not tangents.subject.own_code or rounded:
        return False
    terms = sum(float((coordinates(t).double() * coordinates(w).double()).abs().sum()) for t, w in pairs)
    return off <= 2 * torch.finfo(torch.float32).eps * terms


NARROWER = {torch.float64: torch.float32, torch.complex128: torch.complex64}


def _alone(tangents: Tangents) -> list[Failure]:
    """The failures of each input alone, which say more than that of all together."""
    if len(tangents.places) == 1:
        return []
    ones = [replace(tangents, places=(place,)) for place in tangents.places]
    found = [each for one in ones for each in _against_differences(one, one.by_dual_numbers(one.direction))]
    return [each for each in found if isinstance(each, Failure)]


def _as_reverse(tangents: Tangents, got: Sequence[Tensor | None], weights: Sequence[Tensor | None]) -> bool:
    """Whether the weighed tangents are what the gradients give: u (J v) is (u J) v."""
    subject, sample = tangents.subject, tangents.sample
    flat = list(tangents.packed.values)
    found = vjp(lambda values: subject.call(sample, values), flat, tangents.places, weights)
    steps = tangents.packed.unpacked(tangents.direction)
    gradients = found or [None] * len(tangents.places)
    reverse = weighed(gradients, [steps[place] for place in tangents.places])
    forward = weighed(got, weights)
    return abs(reverse - forward) <= AGREE * max(abs(reverse), abs(forward))


AGREE = 1e-6
"""How far forward and reverse mode may differ, as a part of either: both are exact but for rounding."""


def _failure(tangents: Tangents, got: Sequence[Tensor | None], mine: float, right: float) -> Failure:
    subject, sample = tangents.subject, tangents.sample
    names = ", ".join(sample.labels[place] for place in tangents.places)
    evidence: dict[str, Any] = {"sample": named(sample, torch.float64, tangents.device)}
    reverse = all(_reverse_is(tangents, weights) for weights in tangents.weights)
    evidence["reverse mode"] = "right" if reverse else "wrong as well"
    shown = f"the weighed sum of all is {mine:.6g} where {right:.6g} is right"
    name, cause = "", UNKNOWN
    for position, result in enumerate(subject.results(sample)):
        if tangents.weights[0][position] is None:
            continue
        expected = tangents.element_by_element(position, tangents.direction)
        tangent = got[position]
        found = torch.zeros_like(expected) if tangent is None else tangent.cpu().to(expected.dtype)
        off = (found - expected).abs()
        if not off.numel() or float(off.max()) <= ROUGH * float(expected.abs().max()):
            continue
        place = off.argmax()
        index = [int(i) for i in torch.unravel_index(place, off.shape)] if off.dim() else []
        looks = diagnose(Observation(tangent, expected, what="it"))
        name, cause = f" of `{result.name}`", looks.cause
        at = f"at {index} " if index else ""
        value, truth = found.reshape(-1)[place].item(), expected.reshape(-1)[place].item()
        shown = f"{at}it is {value:.6g} where {truth:.6g} is right"
        shown += f"; {looks.reason}" if looks.reason else ""
        evidence.update({"index": index, "got": value, "expected": truth, "looks like": cause})
        break
    said = "; reverse mode is right" if reverse else ""
    message = f"the tangent{name} by `{names}` differs from finite differences: {shown}{said}"
    where = _rule(subject) or rule_place(subject, sample.names[tangents.places[0]])
    return Failure(NAME, names, "forward-mode" if reverse else cause, message, where, evidence)


ROUGH = 1e-4
"""What counts as wrong in one element, beside the largest: these differences have no error bound."""


def _reverse_is(tangents: Tangents, weights: Sequence[Tensor | None]) -> bool:
    """Whether the gradients are what finite differences say, along the same direction."""
    numbers = tangents.numerically(weights, tangents.direction)
    if numbers is None:
        return False
    flat = list(tangents.packed.values)
    found = vjp(lambda v: tangents.subject.call(tangents.sample, v), flat, tangents.places, weights)
    steps = tangents.packed.unpacked(tangents.direction)
    reverse = weighed(found or [None] * len(tangents.places), [steps[place] for place in tangents.places])
    return abs(reverse - numbers.value) <= numbers.error


def _rule(subject: Subject) -> str | None:
    formulas = [rule for rule in subject.specification.tangents.rules.values() if isinstance(rule, Formula)]
    return formulas[0].where if formulas else None


def _second_order(tangents: Tangents) -> Findings:
    """The derivative of what the tangent formulas give, by autograd and by finite differences of it."""
    subject, sample, packed = tangents.subject, tangents.sample, tangents.packed
    weights = tangents.weights[0]
    with torch.enable_grad():
        leaves = [
            value.detach().clone().requires_grad_() if place in tangents.places else value
            for place, value in enumerate(packed.values)
        ]
        inputs = [leaves[place] for place in tangents.places]
        found = tangents.by_dual_numbers(tangents.direction, leaves)
        pairs = [
            (tangent, weight)
            for tangent, weight in zip(found, weights, strict=True)
            if tangent is not None and weight is not None and tangent.requires_grad
        ]
    got: Sequence[Tensor | None] = [None] * len(inputs)
    if pairs:
        outputs, grads = zip(*pairs, strict=True)
        got = torch.autograd.grad(outputs, inputs, grads, allow_unused=True)

    def function(flat: Sequence[Any]) -> list[Tensor]:
        again = tangents.by_dual_numbers(tangents.direction, packed.unpacked(flat[0]))
        return [
            torch.zeros_like(result) if tangent is None else tangent
            for tangent, result in zip(again, tangents.results, strict=True)
        ]

    numbers = numerical_gradient(
        function,
        [packed.row],
        0,
        weights,
        elements=max(1, subject.effort.moved(sample.elements) // SHARE),
        directions=DIRECTIONS,
        generator=subject.generator(),
    )
    worst = Numbers(packed, numbers).judge(dict(zip(tangents.places, got, strict=True)))
    if worst is None:
        return
    place, difference = worst
    label = sample.labels[place]
    yield Failure(
        NAME,
        label,
        "forward-mode",
        f"the derivative of the tangent by `{label}` is not what finite differences of the tangent say: "
        f"{difference}; something that the tangent formula uses is hidden from autograd",
        _rule(subject) or subject.specification.where,
        {"sample": named(sample, torch.float64, tangents.device), **difference.evidence()},
    )


FORWARD_MODE = Property(NAME, "forward-mode derivatives are right", run)
