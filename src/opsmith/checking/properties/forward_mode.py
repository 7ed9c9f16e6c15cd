"""Forward mode is right: Jacobian-vector products against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck

from opsmith.checking.causes import UNKNOWN
from opsmith.checking.derivative import STEP
from opsmith.checking.diagnosis import explain_difference
from opsmith.checking.difference import Difference, off_gradcheck
from opsmith.checking.differentiated import rule_place
from opsmith.checking.differentiating import each_subset
from opsmith.checking.numerical import numerical_fault, quiet
from opsmith.checking.property import Findings, Property
from opsmith.checking.report import Failure
from opsmith.checking.sample import Sample, is_inexact
from opsmith.checking.subject import Subject
from opsmith.core.formula import Formula

NAME = "forward_mode"


def run(subject: Subject) -> Findings:
    """Check the tangents of every sample, by each input alone and by all together."""
    yield from each_subset(NAME, subject, _check)


def _check(subject: Subject, sample: Sample, places: tuple[int, ...], fast: bool) -> Failure | None:
    for device in subject.devices_with(torch.float64):
        modes: dict[str, Any] = {"check_forward_ad": True, "check_backward_ad": False, "fast_mode": fast}
        text = numerical_fault(gradcheck, subject, sample, places, device, **modes)
        if text is not None:
            return _failure(subject, sample, places, text)
        if subject.specification.tangents.rules:
            text = numerical_fault(
                gradcheck, subject, sample, places, device, wrap=_tangents_of, fast_mode=fast
            )
            if text is not None:
                return _second_order_failure(subject, sample, places, text)
    return None


def _tangents_of(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """A function's tangents in one direction, as a function of its inputs."""

    def tangents(*inputs: Tensor) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        directions = [torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in inputs]
        with forward_ad.dual_level():
            pairs = zip(inputs, directions, strict=True)
            results = function(*(forward_ad.make_dual(each, step.to(each.device)) for each, step in pairs))
            found = [forward_ad.unpack_dual(result) for result in results]
        return tuple(
            torch.zeros_like(pair.primal) if pair.tangent is None else pair.tangent for pair in found
        )

    return tangents


def _second_order_failure(subject: Subject, sample: Sample, places: tuple[int, ...], text: str) -> Failure:
    names = ", ".join(sample.labels[place] for place in places)
    message = (
        f"the derivative of the tangent by `{names}` is not what finite differences of the tangent say: "
        f"something that the tangent formula uses is hidden from autograd. gradcheck: {text}"
    )
    formulas = [rule for rule in subject.specification.tangents.rules.values() if isinstance(rule, Formula)]
    where = formulas[0].where if formulas else subject.specification.where
    return Failure(
        NAME, names, "forward-mode", message, where, {"sample": f"{sample} in float64", "gradcheck": text}
    )


def _failure(subject: Subject, sample: Sample, places: tuple[int, ...], text: str) -> Failure:
    names = ", ".join(sample.labels[place] for place in places)
    where = rule_place(subject, sample.names[places[0]])
    evidence = {"sample": f"{sample} in float64", "gradcheck": text}
    for position, result in enumerate(subject.results(sample)):
        found = _compare(subject, sample, places, position) if result.differentiable else None
        if found is not None:
            difference, cause, reason = found
            what = f"the tangent of `{result.name}` by `{names}` is not what finite differences say"
            message = f"{what}: {difference}" + (f"; {reason}" if reason else "")
            return Failure(NAME, names, cause, message, where, {**evidence, **difference.evidence()})
    message = f"gradcheck rejects forward mode by `{names}`: {text}"
    return Failure(NAME, names, UNKNOWN, message, where, evidence)


def _compare(
    subject: Subject, sample: Sample, places: tuple[int, ...], position: int
) -> tuple[Difference, str, str] | None:
    """The worst element of one result's tangent, for a random direction."""
    generator = subject.generator()
    flat = sample.at(torch.float64)
    directions = {
        place: torch.randn(flat[place].shape, generator=generator, dtype=flat[place].dtype)
        for place in places
    }

    def moved(step: float) -> Tensor:
        values = [v + step * directions[p] if p in directions else v for p, v in enumerate(flat)]
        result: Tensor = subject.call(sample, values)[position]
        return result

    if subject.call(sample, flat)[position] is None:
        return None
    expected = (moved(STEP) - moved(-STEP)) / (2 * STEP)
    if not is_inexact(expected):
        return None
    with quiet(), forward_ad.dual_level():
        duals = [forward_ad.make_dual(v, directions[p]) if p in directions else v for p, v in enumerate(flat)]
        got = forward_ad.unpack_dual(subject.call(sample, duals)[position]).tangent
    mine = torch.zeros_like(expected) if got is None else got
    difference = off_gradcheck(mine, expected)
    return None if difference is None else (difference, *explain_difference(got, expected))


FORWARD_MODE = Property(NAME, "forward-mode derivatives are right", run)
