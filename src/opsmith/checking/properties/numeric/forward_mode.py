"""Forward mode: tangents against finite differences, and against the gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from opsmith.checking.calls import computed_in, differentiated, rule_location
from opsmith.checking.causes import UNKNOWN
from opsmith.checking.diagnosis import Observation, diagnose
from opsmith.checking.numerics.agreement import is_derivative
from opsmith.checking.numerics.answer import Computation
from opsmith.checking.numerics.autodiff import differentiate, vjp
from opsmith.checking.numerics.compare import agree_to_share, distinct_texts, unravel
from opsmith.checking.numerics.directional import DirectionalFunction, PackedTensors, coordinates
from opsmith.checking.numerics.finite_differences import (
    DirectionalDerivative,
    derivative_along,
    numerical_gradient,
)
from opsmith.checking.numerics.judge import judge
from opsmith.checking.numerics.noise import Noise, noise_of
from opsmith.checking.promises import of_forward_mode
from opsmith.checking.properties.numeric.differentiable import each_subset
from opsmith.checking.properties.numeric.second_order import DIRECTIONS, SHARE, NumericalDerivatives
from opsmith.checking.property import Coverage, Findings, Note, Property, Skipped, covered_samples
from opsmith.checking.report import Failure
from opsmith.checking.samples.cases import case_name
from opsmith.checking.samples.grad_outputs import random_grad_outputs, results_with_gradient
from opsmith.checking.samples.sample import Sample, is_inexact
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.checking.subject import Subject
from opsmith.checking.subject_kinds import through_apply
from opsmith.core.cached_property import cached_property
from opsmith.core.formula import Formula

NAME = "forward_mode"


def run(subject: Subject) -> Findings:
    """Check forward mode on every sample; beside surrogate gradients, tangents that the author wrote."""
    if not subject.specification.gradients.surrogate:
        yield from each_subset(NAME, _check_subset, subject)
    elif any(isinstance(rule, Formula) for rule in subject.specification.tangents.rules.values()):
        yield from covered_samples(NAME, _beside_surrogates, "there is nothing to differentiate", subject)
    else:
        yield Skipped("the gradients are surrogates, wrong on purpose; the property `surrogate` holds them")


def _beside_surrogates(subject: Subject, sample: Sample, coverage: Coverage) -> Findings:
    """Compare the tangents with the surrogate gradients: u (J v) is (u J) v, whatever J is.

    A backward that is not linear in grad_output has no J; the form of the tangents is checked all the same.
    """
    subsets = [*differentiated(subject, sample).subsets()]
    for argnums in reversed(subsets):
        for device in subject.devices_with(torch.float64):
            tangents = Tangents(subject, sample, argnums, device)
            if not any(weight is not None for weight in tangents.weights[0]):
                continue
            coverage.ran += 1
            got = tangents.by_dual_numbers(tangents.direction)
            own = through_apply(subject)
            if own is not None:  # it raises what torch says about their number, shapes and dtypes
                replace(tangents, subject=own).by_dual_numbers(tangents.direction)
            if not subject.linear:
                coverage.refused[WITHOUT_JACOBIAN] = None
                continue
            for weights in tangents.weights:
                if not _as_reverse(tangents, got, weights):
                    yield _beside_reverse(tangents, got, weights)
                    return  # the other inputs would report the same


WITHOUT_JACOBIAN = (
    "the numbers of the tangents were left out: the backward is declared not to be linear in grad_output"
)


def _beside_reverse(
    tangents: Tangents, got: Sequence[Tensor | None], weights: Sequence[Tensor | None]
) -> Failure:
    """The failure for tangents that are not those of the surrogate gradient; a warning if they are true."""
    actual, right = weighed(got, weights), tangents.by_gradients(weights)
    numbers = tangents.numerically(weights, tangents.direction)
    true = numbers is not None and abs(actual - numbers.value) <= numbers.error
    sums = distinct_texts(actual, right)
    message = (
        f"the tangents by `{tangents.labels}` do not agree with the surrogate gradients, so that forward and "
        f"reverse mode give other Jacobians: their weighed sum is {sums[0]}, and by the backward it is "
        f"{sums[1]}"
    )
    if not true:
        return tangents.failure("forward-mode", message, {"got": actual, "expected": right})
    message += "; they are the derivatives of the forward"
    return replace(
        tangents.failure("forward-mode", message, {"got": actual, "expected": right}), given="unpromised"
    )


def _check_subset(
    subject: Subject, sample: Sample, argnums: tuple[int, ...], right: tuple[int, ...]
) -> Findings:
    for device in subject.devices_with(torch.float64):
        tangents = Tangents(subject, sample, argnums, device)
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
    """Compare the tangents by one input alone with those where the other inputs have zero tangents."""
    subject, sample = tangents.subject, tangents.sample
    pieces = together.direction.split(together.packed.sizes)
    (argnum,) = tangents.argnums
    alone = pieces[together.argnums.index(argnum)]
    masked = torch.cat(
        [piece if p == argnum else 0 * piece for p, piece in zip(together.argnums, pieces, strict=True)]
    )
    expected = together.by_dual_numbers(masked)
    for position, (result, actual, right) in enumerate(
        zip(subject.results(sample), tangents.by_dual_numbers(alone), expected, strict=True)
    ):
        like = actual if right is None else right
        if like is None:
            continue
        # Zero times the derivative by another input is nan where there is none.
        known = tangents.results[position].isfinite() & (True if right is None else right.isfinite())
        got, other = (
            torch.zeros_like(like) if each is None else each.where(known, 0) for each in (actual, right)
        )
        if agree_to_share(got, other, AGREE):
            continue
        if tangents.rounds_to_float32 and agree_to_share(got, other, LOWER_AGREE):
            continue
        if any(
            each.only_rounds(position, along, got, other)
            for each, along in ((tangents, alone), (together, masked))
        ):
            continue
        label = sample.labels[argnum]
        message = (
            f"the tangent of `{result.name}` by `{label}` is another one where `{label}` alone has a tangent "
            f"than where every input has one: they differ by {float((got - other).abs().max()):.3g}"
        )
        yield tangents.failure("forward-mode", message, {})
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
    undecided = 0
    for weights in tangents.weights:
        actual = weighed(got, weights)
        if is_derivative(tangents.line(weights), tangents.direction, actual, _size_of_terms(got, weights)):
            continue
        numbers = tangents.numerically(weights, tangents.direction)
        if numbers is None:
            undecided += not _as_reverse(tangents, got, weights)
        elif not tangents.agrees(actual, numbers, weights):
            if _is_rounding(tangents, got, weights, abs(actual - numbers.value) - numbers.error):
                yield Note(ROUNDED)
                continue
            yield from _alone(tangents) or [_failure(tangents, got, actual, numbers.value)]
            return
    if undecided:
        words = (
            f"finite differences cannot decide the tangents of {tangents.sample.brief}, where forward and "
            "reverse mode differ, as they may at a kink"
        )
        yield Note(words) if undecided < len(tangents.weights) else Skipped(words)


def _complex(tangents: Tangents, name: str, tangent: Tensor, value: Tensor) -> Failure:
    message = (
        f"the tangent of `{name}` by `{tangents.labels}` is {tangent.dtype}, and `{name}` is {value.dtype}: "
        "return its real part"
    )
    return tangents.failure("dtype", message, {})


ROUNDED = (
    "the tangents and differences of the forward differ by rounding to float32, as where the backward has a "
    "constant in float64 and the forward the same in float32"
)


def _is_rounding(
    tangents: Tangents, got: Sequence[Tensor | None], weights: Sequence[Tensor | None], off: float
) -> bool:
    """True if tangents and a forward that was not written for autograd differ by rounding to float32.

    Tangents that are numbers of float32 are another matter: they were computed in it.
    """
    pairs = [(t, w) for t, w in zip(got, weights, strict=True) if t is not None and w is not None]
    rounded = all(
        torch.equal(t.to(LOWER_PRECISION[t.dtype]).to(t.dtype), t)
        for t, _ in pairs
        if t.dtype in LOWER_PRECISION
    )
    return tangents.subject.kind.own_forward and not rounded and _fits_float32(got, weights, off)


def _fits_float32(got: Sequence[Tensor | None], weights: Sequence[Tensor | None], off: float) -> bool:
    """True if a weighed sum of tangents is off by no more than rounding to float32."""
    return off <= 2 * torch.finfo(torch.float32).eps * _size_of_terms(got, weights)


def _size_of_terms(tangents: Sequence[Tensor | None], weights: Sequence[Tensor | None]) -> float:
    """The sum of the absolute terms of a weighed sum."""
    pairs = [(t, w) for t, w in zip(tangents, weights, strict=True) if t is not None and w is not None]
    return sum(float((coordinates(t).double() * coordinates(w).double()).abs().sum()) for t, w in pairs)


LOWER_PRECISION = {torch.float64: torch.float32, torch.complex128: torch.complex64}


def _alone(tangents: Tangents) -> list[Failure]:
    """The failures of each input alone, which are more precise than that of all together."""
    if len(tangents.argnums) == 1:
        return []
    ones = [replace(tangents, argnums=(argnum,)) for argnum in tangents.argnums]
    found = [each for one in ones for each in _against_differences(one, one.by_dual_numbers(one.direction))]
    return [each for each in found if isinstance(each, Failure)]


def _as_reverse(tangents: Tangents, got: Sequence[Tensor | None], weights: Sequence[Tensor | None]) -> bool:
    """True if the weighed tangents agree with the gradients: u (J v) is (u J) v."""
    reverse, forward = tangents.by_gradients(weights), weighed(got, weights)
    size = max(abs(reverse), _size_of_terms(got, weights))
    return abs(reverse - forward) <= AGREE * size or (
        tangents.rounds_to_float32 and abs(reverse - forward) <= LOWER_AGREE * size
    )


AGREE = 1e-6
"""Allowed relative difference of forward and reverse mode, which are exact but for rounding."""

LOWER_AGREE = 1e-4
"""The same, where they are computed in float32."""


def _failure(tangents: Tangents, got: Sequence[Tensor | None], actual: float, right: float) -> Failure:
    subject, sample = tangents.subject, tangents.sample
    evidence: dict[str, Any] = {}
    reverse = all(_reverse_is(tangents, weights) for weights in tangents.weights)
    evidence["reverse mode"] = "right" if reverse else "wrong as well"
    sums = distinct_texts(actual, right)
    shown = f"the weighed sum of all is {sums[0]} where {sums[1]} is right"
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
        worst = int(off.argmax())
        index = list(unravel(worst, off.shape))
        looks = diagnose(Observation(tangent, expected))
        name, cause = f" of `{result.name}`", looks.cause
        at = f"at {index} " if index else ""
        value, truth = found.reshape(-1)[worst].item(), expected.reshape(-1)[worst].item()
        texts = distinct_texts(value, truth)
        shown = f"{at}it is {texts[0]} where {texts[1]} is right"
        shown += f"; {looks.reason}" if looks.reason else ""
        evidence.update({"index": index, "got": value, "expected": truth, "looks like": cause})
        break
    if cause == UNKNOWN and _fits_float32(got, tangents.weights[0], abs(actual - right)):
        cause = "precision"
        shown += "; it is off like rounding to float32"
    reverse_words = "; reverse mode is right" if reverse else ""
    message = (
        f"the tangent{name} by `{tangents.labels}` differs from finite differences: {shown}{reverse_words}"
    )
    return tangents.failure("forward-mode" if reverse else cause, message, evidence)


ROUGH = 1e-4
"""Error of a wrong element, relative to the largest: these differences have no error bound."""


def _reverse_is(tangents: Tangents, weights: Sequence[Tensor | None]) -> bool:
    """True if the gradients agree with finite differences along the same direction."""
    numbers = tangents.numerically(weights, tangents.direction)
    return numbers is not None and abs(tangents.by_gradients(weights) - numbers.value) <= numbers.error


def _second_order(tangents: Tangents) -> Findings:
    """Compare the derivative of the tangents by autograd with finite differences of the tangents."""
    subject, sample, packed = tangents.subject, tangents.sample, tangents.packed
    weights = tangents.weights[0]
    with torch.enable_grad():
        leaves = [
            value.detach().clone().requires_grad_() if argnum in tangents.argnums else value
            for argnum, value in enumerate(packed.values)
        ]
        inputs = [leaves[argnum] for argnum in tangents.argnums]
        got = differentiate(tangents.by_dual_numbers(tangents.direction, leaves), inputs, weights)

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
    worst = NumericalDerivatives(packed, numbers).judge(dict(zip(tangents.argnums, got, strict=True)))
    if worst is None:
        return
    argnum, difference = worst
    label = sample.labels[argnum]
    message = (
        f"the derivative of the tangent by `{label}` differs from finite differences of the tangent: "
        f"{difference}; something that the tangent formula uses is hidden from autograd"
    )
    reference = subject.specification.where
    found = replace(tangents, argnums=(argnum,))
    failure = found.failure("forward-mode", message, difference.evidence(), default=reference)
    # Nobody wrote the second order of a class's tangents.
    yield replace(failure, given="unpromised") if subject.kind.own_forward else failure


FORWARD_MODE = Property(
    NAME,
    "forward-mode derivatives are right",
    run,
    subset=True,
    differences=True,
    gradcheck="torch.autograd.gradcheck(lambda {names}: {call}, ({names},), check_forward_ad=True, "
    "check_backward_ad=False, check_undefined_grad=False, check_batched_grad=False)",
    given=of_forward_mode,
    reruns=True,
    sends_gradients=True,
)


@dataclass(frozen=True)
class Tangents:
    """Forward mode by some inputs of a sample, in float64.

    Args:
        subject: The subject of the check.
        sample: The sample.
        argnums: The inputs.
        device: The device.
    """

    subject: Subject
    sample: Sample
    argnums: tuple[int, ...]
    device: torch.device

    @property
    def labels(self) -> str:
        """Names of the inputs in messages."""
        return ", ".join(self.sample.labels[argnum] for argnum in self.argnums)

    def failure(
        self, cause: str, message: str, evidence: Mapping[str, Any], default: str | None = None
    ) -> Failure:
        """A failure by these inputs.

        Args:
            cause: Its cause.
            message: Its message.
            evidence: Its evidence.
            default: `file:line` if there is no tangent formula; None for the rule of the first input.
        """
        rules = self.subject.specification.tangents.rules.values()
        where = next((rule.where for rule in rules if isinstance(rule, Formula)), default)
        where = where or rule_location(self.subject, self.sample.names[self.argnums[0]])
        case = case_name(self.sample, torch.float64, self.device)
        return Failure(NAME, self.labels, cause, message, where, {"sample": case, **evidence})

    def call(self, flat: Sequence[Any]) -> list[Any]:
        """The results on the device, of numbers on the CPU, as numbers on the CPU."""
        return self.subject.call(self.sample, flat, self.device)

    @cached_property
    def packed(self) -> PackedTensors:
        """The inputs, those with tangents in a row."""
        return PackedTensors(self.sample.in_double(), self.argnums)

    @cached_property
    def results(self) -> list[Any]:
        """Results of the operator."""
        with torch.no_grad():
            return self.call(self.sample.in_double())

    @cached_property
    def weights(self) -> list[list[Tensor | None]]:
        """Random weights of the results that have tangents, several times."""
        generator = self.subject.generator(2)
        open_ = results_with_gradient(self.subject, self.sample, self.results)
        count = self.subject.effort.tangent_weights
        return [random_grad_outputs(self.results, open_, generator) for _ in range(count)]

    @cached_property
    def direction(self) -> Tensor:
        """A random move of the row: each number by about its own size."""
        line, generator = self.line(self.weights[0]), self.subject.generator()
        part = torch.rand(self.packed.row.shape, generator=generator, dtype=torch.float64) + 0.5
        return line.direction(generator) * part

    def line(self, weights: Sequence[Tensor | None]) -> DirectionalFunction:
        """The results as they move with the inputs."""
        return DirectionalFunction(
            lambda flat: self.call(self.packed.unpacked(flat[0])),
            [self.packed.row],
            0,
            weights,
        )

    def by_dual_numbers(self, direction: Tensor, values: Sequence[Any] | None = None) -> list[Tensor | None]:
        """The tangents of the results along a direction of the row; None where forward mode has none.

        Args:
            direction: Move of each number of the row.
            values: The inputs, if not those of the sample.
        """
        steps = self.packed.unpacked(direction)
        flat = list(self.packed.values if values is None else values)
        # torch's own operators without forward mode raise for inputs that require a gradient, and for others
        # they silently return zeros.
        with torch.enable_grad(), without_warnings(), forward_ad.dual_level():
            for argnum in self.argnums:
                value = flat[argnum] if values is not None else flat[argnum].detach().requires_grad_()
                tangent = steps[argnum].clone().contiguous()
                flat[argnum] = forward_ad.make_dual(value.clone(), tangent)  # it may write into both
            results = self.call(flat)
            found = [forward_ad.unpack_dual(r).tangent if is_inexact(r) else None for r in results]
        return found if values is not None else [None if each is None else each.detach() for each in found]

    @property
    def rounds_to_float32(self) -> bool:
        """True if it computes in float32."""
        return self.computed_in() == torch.float32

    def computed_in(self) -> torch.dtype:
        """The dtype that it computes in."""
        return computed_in(self.subject, self.sample)

    def only_rounds(self, position: int, direction: Tensor, got: Tensor, expected: Tensor) -> bool:
        """True if a tangent is rounding noise, as one that is zero."""

        def again(given: list[Any]) -> list[Tensor | None]:
            *values, along = given
            found = self.by_dual_numbers(along, values)[position]
            return [torch.zeros_like(expected) if found is None else found.detach()]

        flat, subject = [*self.packed.values, direction], self.subject
        tangent = Computation.of(again, flat, subject.generator(), computed_in=self.computed_in)
        (answer,) = tangent.twins(flat, torch.float64)
        return not judge(got, replace(answer, value=expected.detach())).wrong

    def agrees(self, actual: float, numbers: DirectionalDerivative, weights: Sequence[Tensor | None]) -> bool:
        """True if the sum of the weighed tangents is the derivative by differences, to rounding."""
        off = abs(actual - numbers.value)
        return off <= numbers.error or off <= numbers.error + self.rounding(weights)

    def rounding(self, weights: Sequence[Tensor | None]) -> float:
        """Rounding noise of the weighed tangents along the direction, whose terms may cancel."""

        def tangents(given: list[Any]) -> list[Tensor | None]:
            *values, along = given
            found = [None if each is None else each.detach() for each in self.by_dual_numbers(along, values)]
            return [torch.tensor(weighed(found, weights), dtype=torch.float64)]

        flat = [*self.packed.values, self.direction]
        return Computation.of(tangents, flat, self.subject.generator()).noise(self.computed_in())

    def by_gradients(self, weights: Sequence[Tensor | None]) -> float:
        """The derivative of the weighed results along the direction, by reverse mode: (u J) v."""
        steps = self.packed.unpacked(self.direction)
        found = vjp(self.call, list(self.packed.values), self.argnums, weights)
        return weighed(found, [steps[argnum] for argnum in self.argnums])

    def numerically(
        self, weights: Sequence[Tensor | None], direction: Tensor
    ) -> DirectionalDerivative | None:
        """The derivative of the weighed results along a direction, by differences; None where unknown."""
        line = self.line(weights)
        return derivative_along(line, self.noise(line), direction)

    def noise(self, line: DirectionalFunction) -> Noise:
        """The noise of the weighed results."""
        return noise_of(line, self.subject.generator())

    def element_by_element(self, position: int, direction: Tensor) -> Tensor:
        """The tangent of one result, by differences: less exact, and of every element."""
        result = self.results[position]
        one = torch.ones_like(result.real if result.is_complex() else result)
        alone: list[Tensor | None] = [None] * len(self.results)
        alone[position] = torch.complex(one, one) if result.is_complex() else one
        line = self.line(alone)
        step = self.noise(line).step
        coarse, fine = (
            (line.along(direction, h) - line.along(direction, -h)) / (2 * h) for h in (step, step / 2)
        )
        found = (4 * fine - coarse) / 3
        shaped = torch.view_as_complex(found.view(-1, 2)) if result.is_complex() else found
        return shaped.view(result.shape)


def weighed(results: Sequence[Tensor | None], weights: Sequence[Tensor | None]) -> float:
    """The real inner product of tensors and their weights; None counts as zeros, and so does 0 times nan."""
    pairs = [
        (coordinates(result).double(), coordinates(weight).double())
        for result, weight in zip(results, weights, strict=True)
        if result is not None and weight is not None
    ]
    return sum(float(result.masked_fill(weight == 0, 0) @ weight) for result, weight in pairs)
