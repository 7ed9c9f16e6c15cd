"""Second order is right: the derivatives of the gradients, against finite differences of the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.checking.case import named
from opsmith.checking.diagnosis.comparable import alike
from opsmith.checking.difference import Difference
from opsmith.checking.differentiated import rule_place
from opsmith.checking.differentiating import each_subset
from opsmith.checking.property import Findings, Note, Property, Skipped
from opsmith.checking.report import Failure
from opsmith.checking.sample import Sample
from opsmith.checking.second_derivative import Gradients
from opsmith.checking.subject import Subject

NAME = "second_order"


def run(subject: Subject) -> Findings:
    """Differentiate the gradients of every sample, by all inputs together and by each alone."""
    adopted = subject.specification.adopted
    if subject.apply is not None and adopted is not None and adopted.once_differentiable:
        yield Skipped(
            "its backward is marked with `once_differentiable`: torch refuses to differentiate it again"
        )
        return
    yield from each_subset(NAME, subject, _look)


def _look(subject: Subject, sample: Sample, places: tuple[int, ...], right: tuple[int, ...]) -> Findings:
    for device in subject.devices_with(torch.float64):
        gradients = Gradients(subject, sample, places, device)
        try:
            if right:
                yield from _against_all(gradients, Gradients(subject, sample, right, device))
            else:
                yield from _against_differences(gradients)
        except errors.GraphCutError as error:
            evidence = {"sample": named(sample, torch.float64, device)}
            yield Failure(NAME, error.argument, "second-order", str(error), error.where, evidence)
            return


def _against_differences(gradients: Gradients) -> Findings:
    weights = gradients.weights()
    found = gradients.differentiated(weights)
    if not all(bool(each.isfinite().all()) for each in gradients(gradients.values)):
        yield Skipped(f"{gradients.sample.brief} was left out: the gradient itself is infinite or nan there")
        return
    numbers = gradients.numerically(weights)
    if not numbers.found.tells:
        yield Skipped(f"finite differences of the gradient tell nothing in {gradients.sample.brief}")
    for by in numbers.kinked():
        yield Note(
            f"the gradient has a kink in {gradients.sample.brief}, by `{gradients.label(by)}`: whatever lies "
            "between its one-sided derivatives is right there"
        )
    if numbers.judge(found) is None:
        return
    for position, place in enumerate(gradients.places):
        alone = [weight if at == position else None for at, weight in enumerate(weights)]
        found = gradients.differentiated(alone)
        worst = gradients.numerically(alone).judge(found)
        if worst is not None:
            yield _failure(gradients, place, _verdicts(gradients, alone, found), *worst)


RIGHT, MISSING, WRONG = "right", "missing", "wrong"


def _verdicts(
    gradients: Gradients, weights: Sequence[Tensor | None], found: dict[int, Tensor | None]
) -> dict[int, str]:
    """For each place, whether the derivative of one gradient by it is right."""
    verdicts: dict[int, str] = {}
    for by in gradients.by:
        right = gradients.only(by).numerically(weights).judge(found) is None
        mine = found[by]
        missing = mine is None or not mine.any()
        verdicts[by] = RIGHT if right else MISSING if missing else WRONG
    return verdicts


def _failure(
    gradients: Gradients, place: int, verdicts: dict[int, str], by: int, difference: Difference
) -> Failure:
    subject, sample = gradients.subject, gradients.sample
    label = sample.labels[place]
    evidence: dict[str, Any] = {"sample": named(sample, torch.float64, gradients.device)}
    evidence.update({f"by {gradients.label(each)}": verdict for each, verdict in verdicts.items()})
    missing = [gradients.label(each) for each, verdict in verdicts.items() if verdict == MISSING]
    wrong = [gradients.label(each) for each, verdict in verdicts.items() if verdict == WRONG]
    if len(missing) == len(verdicts):
        what = "the gradient of it cannot be differentiated again at all, as if it were a constant"
    elif missing:
        what = f"it lacks what flows through {_listed(missing)}"
    else:
        what = (
            f"what its gradient gives when it is differentiated by {_listed(wrong or [gradients.label(by)])} "
            "differs from finite differences of it"
        )
    shown = f"by `{gradients.label(by)}`, {difference}"
    return Failure(
        NAME,
        label,
        "second-order",
        f"the second order by `{label}` is wrong: {what} ({shown}). {CUT}",
        rule_place(subject, sample.names[place]),
        {**evidence, **difference.evidence()},
    )


CUT = (
    "Something that the gradient depends on is hidden from autograd, as by `.detach()`, `.data`, NumPy, "
    "`no_grad`, or a value that the forward computed and kept, on `ctx` or by `save_for_backward`, and that "
    "is no result of it: compute it again in the backward; or what is used has a wrong backward of its own"
)


def _listed(labels: Sequence[str]) -> str:
    return " and ".join(f"`{label}`" for label in labels)


def _against_all(gradients: Gradients, together: Gradients) -> Findings:
    """The derivatives of one gradient alone, beside those of it where every input requires one."""
    (place,) = gradients.places
    weights = together.weights()
    kept = [weight if at == place else None for at, weight in zip(together.places, weights, strict=True)]
    expected = together.differentiated(kept)
    got = gradients.differentiated([weights[together.places.index(place)]])
    for by in gradients.by:
        mine, right = got[by], expected[by]
        like = gradients.values[by]
        mine, right = (torch.zeros_like(like) if each is None else each for each in (mine, right))
        both = mine.isnan() & right.isnan()  # as where a sample has nan
        mine, right = mine.masked_fill(both, 0), right.masked_fill(both, 0)
        if alike(mine, right, torch.finfo(torch.float64).eps ** 0.5):
            continue
        subject, sample = gradients.subject, gradients.sample
        label = sample.labels[place]
        message = (
            f"the second order by `{label}` is another one where `{label}` alone requires a gradient than "
            f"where every input does: they differ by {float((mine - right).abs().max()):.3g}, by "
            f"`{gradients.label(by)}`"
        )
        evidence = {"sample": named(sample, torch.float64, gradients.device)}
        yield Failure(
            NAME, label, "second-order", message, rule_place(subject, sample.names[place]), evidence
        )
        return


SECOND_ORDER = Property(NAME, "the gradients can be differentiated again, and are right", run)
