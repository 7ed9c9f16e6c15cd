"""Forward mode: compare tangents with finite differences and with the gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from opsmith.checking.calls import computed_in, differentiated
from opsmith.checking.causes import UNKNOWN
from opsmith.checking.diagnosis import Observation, diagnose
from opsmith.checking.numerics.autodiff import differentiate, record, vjp
from opsmith.checking.numerics.directional import DirectionalFunction, PackedTensors, coordinates, represents
from opsmith.checking.numerics.finite_differences import Claim
from opsmith.checking.numerics.noise import noise_of
from opsmith.checking.promises import of_forward_mode
from opsmith.checking.properties.numeric.derivatives import Derivatives, agrees, apart, each_subset
from opsmith.checking.property import Findings, Note, Property, Skipped
from opsmith.checking.report import Failure
from opsmith.checking.run import Coverage, Run, covered_runs
from opsmith.checking.samples.grad_outputs import random_grad_outputs, results_with_gradient
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.checking.subject import Subject
from opsmith.checking.subject_kinds import through_apply
from opsmith.core.cached_property import cached_property
from opsmith.core.formula import Formula
from opsmith.judging.answer import Answer
from opsmith.judging.compare import Difference, distinct_texts, unravel
from opsmith.judging.tensors import is_inexact

NAME = "forward_mode"

Weights = Sequence[Tensor | None]
"""Weights u of the results; the weighted sum of tangents is u (J v)."""


def run(subject: Subject) -> Findings:
    """Check forward mode on every sample; with surrogate gradients, only tangents that the author wrote."""
    if not subject.specification.gradients.surrogate:
        yield from each_subset(NAME, Tangents, _check, subject)
    elif any(isinstance(rule, Formula) for rule in subject.specification.tangents.rules.values()):
        yield from covered_runs(NAME, _beside_surrogates, "there is nothing to differentiate", subject)
    else:
        yield Skipped(
            "the gradients are surrogates, which are wrong on purpose; the property `surrogate` checks them"
        )


def _beside_surrogates(run: Run, coverage: Coverage) -> Findings:
    """Compare the tangents with the surrogate gradients: u (J v) equals (u J) v for every J.

    A backward that is not linear in grad_output has no J; then only the form of the tangents is checked.
    """
    subject = run.subject
    for argnums in reversed([*differentiated(subject, run.sample).subsets()]):
        for device in subject.devices_with(torch.float64):
            tangents = Tangents(subject, run.sample, NAME, device, torch.float64, argnums)
            if not tangents.exist:
                continue
            coverage.ran += 1
            tangents.by_dual_numbers(tangents.direction)
            own = through_apply(subject)
            if own is not None:  # torch raises an error about their number, shapes and dtypes
                replace(tangents, subject=own).by_dual_numbers(tangents.direction)
            if not subject.linear:
                coverage.refused[WITHOUT_JACOBIAN] = None
                continue
            for weights in tangents.weights:
                if not tangents.as_reverse(weights):
                    yield _beside_reverse(tangents, weights)
                    return  # the other inputs would report the same fault


WITHOUT_JACOBIAN = (
    "the numbers of the tangents were left out: the backward is declared not to be linear in grad_output"
)


def _beside_reverse(tangents: Tangents, weights: Weights) -> Failure:
    """The failure for tangents that contradict the surrogate gradient; a warning if they are true."""
    actual, right = tangents.number(weights), tangents.number(weights, reverse=True)
    sums = distinct_texts(actual, right)
    message = (
        f"the tangents by `{tangents.labels}` do not agree with the surrogate gradients: forward and "
        f"reverse mode give different Jacobians. The weighted sum of the tangents is {sums[0]}, and "
        f"the backward gives {sums[1]}"
    )
    true = tangents.claimed(weights, actual).holds
    message += "; they are the derivatives of the forward" if true else ""
    failure = tangents.failed("forward-mode", message, {"got": actual, "expected": right})
    return replace(failure, given="unpromised") if true else failure


def _check(tangents: Tangents, together: Tangents | None) -> Findings:
    if not tangents.exist:
        return
    if together is not None:
        yield from _against_all(tangents, together)
        return
    got = tangents.by_dual_numbers(tangents.direction)
    found = [*_against_differences(tangents, got)]
    yield from found
    if not any(isinstance(each, Failure) for each in found) and tangents.subject.specification.tangents.rules:
        yield from _second_order(tangents)


def _against_all(tangents: Tangents, together: Tangents) -> Findings:
    """Compare the tangents by one input alone with the tangents if the other inputs have zero tangents."""
    (argnum,), label = tangents.argnums, tangents.labels
    pieces = together.direction.split(together.packed.sizes)
    masked = [piece * (at == argnum) for at, piece in zip(together.argnums, pieces, strict=True)]
    right = together.answers_along(torch.cat(masked))
    alone = tangents.answers_along(pieces[together.argnums.index(argnum)])
    # Zero times the derivative by another input is nan if this derivative does not exist.
    known = [
        one
        if one.value is None or other.value is None
        else replace(one, value=one.value.where(other.value.isfinite(), other.value))
        for one, other in zip(alone, right, strict=True)
    ]
    for at, words in apart(known, right):
        name = tangents.subject.results(tangents.sample)[at].name
        message = (
            f"the tangent of `{name}` by `{label}` changes if the other inputs have tangents of zeros: "
            f"{words}"
        )
        yield tangents.failed("forward-mode", message, {})
        return


def _against_differences(tangents: Tangents, got: Sequence[Tensor | None]) -> Findings:
    brief, labels = tangents.sample.brief, tangents.labels
    if not tangents.packed.row.numel():
        yield Skipped(f"{brief} has no floating tensor with elements")
        return
    for name, value, tangent in tangents.named(got):
        if tangent is not None and tangent.is_complex() and not value.is_complex():
            message = (
                f"the tangent of `{name}` by `{labels}` is {tangent.dtype}, and `{name}` is "
                f"{value.dtype}: return the real part of the tangent"
            )
            yield tangents.failed("dtype", message, {})
            return
    undecided = 0
    for weights in tangents.weights:
        claim = tangents.claimed(weights, weighed(got, weights))
        if claim.is_settled():
            continue
        if not claim.numbers.has_estimate:
            undecided += not tangents.as_reverse(weights)
            continue
        worst = claim.worst() and claim.worst(tangents.rounding(weights))
        if worst is None:
            continue
        if _is_rounding(tangents, got, weights, worst[1]):
            yield Note(ROUNDED)
            continue
        yield from _alone(tangents) or [_failure(tangents, got, worst[1])]
        return
    if undecided:
        words = (
            f"finite differences cannot decide the tangents of {brief}: forward and reverse mode "
            "differ there, which is possible at a kink"
        )
        yield Note(words) if undecided < len(tangents.weights) else Skipped(words)


ROUNDED = (
    "the tangents and the finite differences of the forward differ by rounding to float32, for "
    "example because the backward has a constant in float64 and the forward has it in float32"
)


def _is_rounding(tangents: Tangents, got: Sequence[Tensor | None], weights: Weights, off: Difference) -> bool:
    """True if tangents and a forward that was not written for autograd differ only by rounding to float32.

    Tangents that are float32 numbers do not count: they were computed in float32.
    """
    present = (each for each, weight in zip(got, weights, strict=True) if weight is not None)
    rounded = all(each is None or represents(torch.float32, each) for each in present)
    return tangents.subject.kind.own_forward and not rounded and _fits_float32(got, weights, off)


def _fits_float32(got: Sequence[Tensor | None], weights: Weights, off: Difference) -> bool:
    """True if the error of a weighted sum of tangents is at most rounding to float32."""
    size = float(_terms(got, weights).abs().sum())
    return bool(abs(off.got - off.expected) <= 2 * torch.finfo(torch.float32).eps * size)


def _alone(tangents: Tangents) -> list[Failure]:
    """The failures of each input alone, which are more precise than the failure of all inputs together."""
    if len(tangents.argnums) == 1:
        return []
    ones = [tangents.alone(argnum) for argnum in tangents.argnums]
    found = [each for one in ones for each in _against_differences(one, one.by_dual_numbers(one.direction))]
    return [each for each in found if isinstance(each, Failure)]


def _failure(tangents: Tangents, got: Sequence[Tensor | None], wrong: Difference) -> Failure:
    reverse = all(
        tangents.claimed(weights, tangents.number(weights, reverse=True)).holds
        for weights in tangents.weights
    )
    evidence: dict[str, Any] = {"reverse mode": "right" if reverse else "wrong as well"}
    sums = distinct_texts(wrong.got, wrong.expected)
    shown = f"the weighted sum of all tangents is {sums[0]} where {sums[1]} is right"
    about, cause = "", UNKNOWN
    for position, (name, _, tangent) in enumerate(tangents.named(got)):
        if tangents.weights[0][position] is None:
            continue
        expected = tangents.element_by_element(position)
        found = torch.zeros_like(expected) if tangent is None else tangent.cpu().to(expected.dtype)
        off = (found - expected).abs()
        if not off.numel() or float(off.max()) <= ROUGH * float(expected.abs().max()):
            continue
        index = unravel(int(off.argmax()), off.shape)
        looks = diagnose(Observation(tangent, expected))
        about, cause = f" of `{name}`", looks.cause
        value, truth = found[index].item(), expected[index].item()
        texts = distinct_texts(value, truth)
        shown = f"{f'at {[*index]} ' if index else ''}it is {texts[0]} where {texts[1]} is right"
        shown += f"; {looks.reason}" if looks.reason else ""
        evidence.update({"index": [*index], "got": value, "expected": truth, "looks like": cause})
        break
    if cause == UNKNOWN and _fits_float32(got, tangents.weights[0], wrong):
        cause = "precision"
        shown += "; its error looks like rounding to float32"
    message = (
        f"the tangent{about} by `{tangents.labels}` differs from finite differences: {shown}"
        f"{'; reverse mode is right' if reverse else ''}"
    )
    return tangents.failed("forward-mode" if reverse else cause, message, evidence)


ROUGH = 1e-4
"""Minimum error of a wrong element, relative to the largest, since these differences have no error bound."""


def _second_order(tangents: Tangents) -> Findings:
    """Compare the derivative of the tangents by autograd with finite differences of the tangents."""
    packed, weights, along = tangents.packed, tangents.weights[0], tangents.direction
    leaves, _, found = record(partial(tangents.by_dual_numbers, along), packed.values, tangents.argnums)
    got = differentiate(found, [leaves[argnum] for argnum in tangents.argnums], weights)

    def function(flat: Sequence[Any]) -> list[Tensor]:
        again = zip(tangents.by_dual_numbers(along, flat), tangents.results, strict=True)
        return [torch.zeros_like(result) if tangent is None else tangent for tangent, result in again]

    worst = tangents.claim(function, packed, weights, dict(zip(tangents.argnums, got, strict=True))).worst()
    if worst is None:
        return
    argnum, difference = worst
    message = (
        f"the derivative of the tangent by `{tangents.sample.labels[argnum]}` differs from finite "
        f"differences of the tangent: {difference}; the tangent formula uses a value that is hidden "
        "from autograd"
    )
    where = tangents.subject.specification.where
    failure = tangents.alone(argnum).failed("forward-mode", message, difference.evidence(), where)
    # Nobody promises the second order of a class's tangents.
    yield replace(failure, given="unpromised") if tangents.subject.kind.own_forward else failure


FORWARD_MODE = Property(
    NAME,
    "forward-mode derivatives are right",
    run,
    inputs="few",
    traits=("differences", "sends-gradients", "reruns"),
    given=of_forward_mode,
)


STILL, AHEAD = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
"""The position on the line through the inputs along the direction, and the move along the line."""


class Tangents(Derivatives):
    """Forward mode by some inputs of a sample, along one direction."""

    def failed(
        self, cause: str, message: str, evidence: Mapping[str, Any], default: str | None = None
    ) -> Failure:
        """A failure located at the tangent formula; without such a formula, at another `file:line`."""
        rules = self.subject.specification.tangents.rules.values()
        where = next((rule.where for rule in rules if isinstance(rule, Formula)), default)
        return self.failure(self.labels, cause, message, where or self.backward_location(), evidence)

    @cached_property
    def packed(self) -> PackedTensors:
        """The inputs; inputs with tangents are joined in a row."""
        return PackedTensors(self.sample.in_double(), self.argnums)

    @cached_property
    def results(self) -> list[Any]:
        """Results of the operator."""
        with torch.no_grad():
            return self.results_at(self.sample.in_double())

    @cached_property
    def weights(self) -> list[list[Tensor | None]]:
        """Several sets of random weights of the results that have tangents."""
        generator = self.subject.generator(2)
        open_ = results_with_gradient(self.subject, self.sample, self.results)
        count = self.subject.effort.tangent_weights
        return [random_grad_outputs(self.results, open_, generator) for _ in range(count)]

    @property
    def exist(self) -> bool:
        """True if any result has a tangent."""
        return any(weight is not None for weight in self.weights[0])

    def named(self, got: Sequence[Tensor | None]) -> Iterator[tuple[str, Any, Tensor | None]]:
        """The name of each result, the result, and its tangent."""
        names = [each.name for each in self.subject.results(self.sample)]
        return zip(names, self.results, got, strict=True)

    @cached_property
    def direction(self) -> Tensor:
        """A random move of the row, which changes each number by about its own size."""
        generator, row = self.subject.generator(), self.packed.row
        part = torch.rand(row.shape, generator=generator, dtype=torch.float64) + 0.5
        return DirectionalFunction(lambda flat: [], [row], 0, []).direction(generator) * part

    def by_dual_numbers(self, direction: Tensor, values: Sequence[Any] | None = None) -> list[Tensor | None]:
        """The tangents of the results along a direction of the row; None for a result without a tangent.

        Args:
            direction: Move of each number of the row.
            values: The inputs; by default the sample's.
        """
        steps = self.packed.unpacked(direction)
        flat = list(self.packed.values if values is None else values)
        # torch's own operators without forward mode raise for inputs that require a gradient, and silently
        # return zeros for other inputs.
        with torch.enable_grad(), without_warnings(), forward_ad.dual_level():
            for argnum in self.argnums:
                value = flat[argnum] if values is not None else flat[argnum].detach().requires_grad_()
                tangent = steps[argnum].clone().contiguous()
                flat[argnum] = forward_ad.make_dual(value.clone(), tangent)  # it may write into both
            results = self.results_at(flat)
            found = [forward_ad.unpack_dual(r).tangent if is_inexact(r) else None for r in results]
        return found if values is not None else [None if each is None else each.detach() for each in found]

    def answers_along(self, direction: Tensor) -> tuple[Answer, ...]:
        """The tangents along a direction, with their rounding; zeros where they are missing or undefined."""

        def tangents(given: list[Any]) -> list[Tensor | None]:
            found = self.by_dual_numbers(given[-1], given[:-1])
            return [*map(_as_number, found, self.results)]

        return self.answers(tangents, [*self.packed.values, direction])

    def weighed_sum(self, weights: Weights, *, reverse: bool = False) -> Answer:
        """The weighted sum of the tangents, u (J v), or from the gradients, (u J) v, with its rounding."""

        def value(given: list[Any]) -> list[Tensor | None]:
            *flat, direction = given
            found, factors = self.by_dual_numbers(direction, flat) if not reverse else (), weights
            if reverse:
                steps = self.packed.unpacked(direction)
                found = vjp(self.results_at, flat, self.argnums, weights)
                factors = [steps[argnum] for argnum in self.argnums]
            return [torch.tensor(weighed(found, factors), dtype=torch.float64)]

        return self.answers(value, [*self.packed.values, self.direction])[0]

    def number(self, weights: Weights, *, reverse: bool = False) -> float:
        """The weighted sum of the tangents, as a number without its rounding."""
        return float(self.weighed_sum(weights, reverse=reverse).tensor)

    def as_reverse(self, weights: Weights) -> bool:
        """True if forward and reverse mode agree."""
        return agrees(self.weighed_sum(weights, reverse=True), self.weighed_sum(weights))

    def rounding(self, weights: Weights) -> float:
        """Rounding noise of the weighted tangents, whose terms may cancel."""
        computation = self.weighed_sum(weights).computation
        assert computation is not None
        return computation.noise(computed_in(self.subject, self.sample))

    def claimed(self, weights: Weights, number: float) -> Claim:
        """A number in the form of a derivative of the weighted results along the direction."""
        got = {0: torch.tensor([number], dtype=torch.float64)}
        return Claim(self._moved, PackedTensors([STILL], (0,)), weights, got, 0, self.subject.generator)

    def _moved(self, flat: Sequence[Any]) -> list[Any]:
        """The results for inputs moved along the direction."""
        return self.results_at(self.packed.unpacked(self.packed.row + flat[0] * self.direction))

    def element_by_element(self, position: int) -> Tensor:
        """The tangent of one result from finite differences, which are less exact, for every element."""
        result = self.results[position]
        one = torch.ones_like(result.real if result.is_complex() else result)
        alone: list[Tensor | None] = [None] * len(self.results)
        alone[position] = torch.complex(one, one) if result.is_complex() else one
        line = DirectionalFunction(self._moved, [STILL], 0, alone)
        step = noise_of(line, self.subject.generator()).step
        coarse, fine = ((line.along(AHEAD, h) - line.along(AHEAD, -h)) / (2 * h) for h in (step, step / 2))
        found = (4 * fine - coarse) / 3
        shaped = torch.view_as_complex(found.view(-1, 2)) if result.is_complex() else found
        return shaped.view(result.shape)


def _as_number(tangent: Tensor | None, result: Any) -> Tensor | None:
    """The tangent of a floating result; 0 if there is no tangent, or if the result has no finite number."""
    if not is_inexact(result):
        return None
    return (torch.zeros_like(result) if tangent is None else tangent).where(result.isfinite(), 0)


def _terms(results: Sequence[Tensor | None], weights: Weights) -> Tensor:
    """The products of tensors and their weights; None counts as zeros, and so does 0 times nan."""
    pairs = [
        (coordinates(result).double(), coordinates(weight).double())
        for result, weight in zip(results, weights, strict=True)
        if result is not None and weight is not None
    ]
    return torch.cat([STILL, *(result.masked_fill(weight == 0, 0) * weight for result, weight in pairs)])


def weighed(results: Sequence[Tensor | None], weights: Weights) -> float:
    """The real inner product of tensors and their weights."""
    return float(_terms(results, weights).sum())
