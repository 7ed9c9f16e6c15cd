"""Linearity of a backward in grad_output: torch adds up gradients before and after an operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import computed_in, differentiated, rule_location
from opsmith.checking.exceptions import refuse_own
from opsmith.checking.numerics.autodiff import vjp
from opsmith.checking.numerics.compare import Difference, all_finite, linearity_difference
from opsmith.checking.numerics.directional import coordinates
from opsmith.checking.numerics.rounding_noise import is_noise
from opsmith.checking.property import Findings, Property, Skipped, each_sample
from opsmith.checking.report import Failure
from opsmith.checking.samples.grad_outputs import plain_grad_outputs
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject

NAME = "linearity"


def run(subject: Subject) -> Findings:
    """Compare the gradient of every input for a u + b v, and for small and large grad_outputs."""
    if subject.specification.gradients.surrogate:
        yield Skipped("the gradients are surrogates; the property `surrogate` holds them to linearity")
    elif not subject.linear:
        yield Skipped("it is declared not to be linear in grad_output")
    else:
        compared: list[bool] = []
        yield from each_sample(NAME, partial(_sample, compared=compared), subject)
        if not any(compared):
            yield NOT_COMPARED if compared else Skipped("there is nothing to differentiate")


NOT_COMPARED = Skipped("no backward gives numbers to compare: `gradient` reports what is wrong")


def _sample(subject: Subject, sample: Sample, compared: list[bool]) -> Findings:
    """Check every input, and add to `compared` for each True if there is something to compare."""
    argnums = differentiated(subject, sample).argnums
    if not argnums:
        return
    first = plain_grad_outputs(subject, sample).in_double()
    for argnum in argnums:
        found = _linear(subject, sample, argnum, first)
        compared.append(found is not NOT_COMPARED)
        if isinstance(found, Failure):
            yield found


def _linear(subject: Subject, sample: Sample, argnum: int, first: Grads) -> Failure | Skipped | None:
    def backward(grads: Grads) -> Tensor | None:
        return vjp(partial(subject.call, sample), sample.in_double(), (argnum,), grads)[0]

    generator = subject.generator(1)
    second = [
        None if each is None else torch.randn(each.shape, generator=generator, dtype=each.dtype)
        for each in first
    ]
    try:
        u, v = backward(first), backward(second)
    except Exception as error:
        refuse_own(error)
        return NOT_COMPARED  # `gradient` reports it
    if u is None or v is None or not u.numel() or not (all_finite(u) and all_finite(v)):
        return NOT_COMPARED  # `gradient` reports missing and nan gradients too
    label = sample.labels[argnum]
    where = rule_location(subject, sample.names[argnum])
    evidence: dict[str, Any] = {"sample": f"{sample} in float64"}
    count = len(sample.flat)

    def again(values: list[Any]) -> list[Tensor | None]:
        return vjp(partial(subject.call, sample), values[:count], (argnum,), values[count:])

    def only_rounds(got: Tensor, expected: Tensor, *given: Grads) -> bool:
        """True if the gradient for grad_outputs is rounding noise, as one that is zero."""
        dtype = computed_in(subject, sample)
        return any(
            is_noise(again, [*sample.in_double(), *each], got, expected, subject.generator(1), dtype)
            for each in given
        )

    if torch.equal(u, v) and bool(u.any()) and not only_rounds(u, torch.zeros_like(u), first, second):
        message = (
            f"the gradient of `{label}` is the same, to the bit, for two grad_outputs that have "
            "nothing in common: multiply by `grad`"
        )
        return Failure(NAME, label, "ignores-grad-output", message, where, evidence)
    known = KnownBackward(first, u), KnownBackward(second, v)
    found = departure(backward, *known)
    if found is None:
        return None
    words, difference = found
    grads, expected = next((grads, right) for each, grads, right, *_ in _combined(*known) if each == words)
    got = backward(grads)
    if got is not None and only_rounds(got, expected, grads, first, second):
        return None
    message = f"the gradient of `{label}` is not linear in grad_output: for {words}, {difference}; {WHY}"
    return Failure(NAME, label, "nonlinear-grad", message, where, {**evidence, **difference.evidence()})


LINEARITY = Property(
    NAME,
    "the gradient is linear in grad_output, and depends on it",
    run,
    varied=True,
    about_gradients=False,
    explains_gradients=True,
    sends_gradients=True,
)


FACTORS = (0.75, -1.5)
SCALES = (2.0**-10, 2.0**10)
"""Small and large gradients too: a backward that clips is linear in the middle. Powers of two, since
rounding to any format is then the same, and the tolerance can be small."""

FLOAT16_SCALES = (2.0**-2, 2.0**2)
"""Bounds for a backward that computes in float16, which ends at 65504 and loses digits below 6e-5."""

SUMMED = 2.0**-6
"""Allowed relative error of a sum: a backward that computes in bfloat16 rounds by 2**-9. A function that is
not additive, such as a norm or a maximum, is off by much more."""

SCALED = torch.finfo(torch.float64).eps ** 0.25
"""Allowed relative error of a multiple: a nearly singular backward may lose three quarters of its digits."""

WHY = "torch adds up gradients before and after an operator, and takes each backward to be linear"

Grads = list[Tensor | None]
Backward = Callable[[Grads], Tensor | None]


@dataclass(frozen=True)
class KnownBackward:
    """Gradients of results, and the gradient that a backward gives for them.

    Args:
        grads: One for each result, in float64; None where there is none.
        gradient: Function that returns the gradient by one input.
    """

    grads: Grads
    gradient: Tensor


def departure(
    backward: Backward, first: KnownBackward, second: KnownBackward
) -> tuple[str, Difference] | None:
    """Describe how a backward is not linear, with the difference; None if it is linear.

    Args:
        backward: Gives the gradient by one input; None stands for zeros.
        first: One answer of it.
        second: Another one.

    Example:
        >>> grads = torch.tensor([1.1, -2.0]), torch.tensor([0.5, 4.0])
        >>> clipped = lambda some: some[0].clamp(-9, 9)
        >>> known = [KnownBackward([each], clipped([each])) for each in grads]
        >>> departure(clipped, *known)[0]
        '1024 times a grad_output'
    """
    for words, grads, expected, size, tolerated in _combined(first, second):
        given = backward(grads)
        got = torch.zeros_like(expected) if given is None else given
        difference = linearity_difference(got, expected, size, tolerated)
        if difference is not None:
            return words, difference
    return None


def _combined(
    first: KnownBackward, second: KnownBackward
) -> Sequence[tuple[str, Grads, Tensor, float, float]]:
    """Combinations of grad_outputs: words, values, right gradient, size of its terms, tolerance."""
    a, b = FACTORS
    u, v = first.gradient, second.gradient
    largest, other = (float(each.abs().max()) if each.numel() else 0.0 for each in (u, v))
    mixed = [
        None if x is None or y is None else a * x + b * y
        for x, y in zip(first.grads, second.grads, strict=True)
    ]
    words = f"{a} u + ({b}) v, where those of u and of v are known"
    found = [(words, mixed, a * u + b * v, abs(a) * largest + abs(b) * other, SUMMED)]
    scales, tolerated = (FLOAT16_SCALES, SUMMED) if _in_float16(u) else (SCALES, SCALED)
    for scale in scales:
        scaled = [None if each is None else scale * each for each in first.grads]
        found.append((f"{scale:g} times a grad_output", scaled, scale * u, scale * largest, tolerated))
    nothing = [None if each is None else torch.zeros_like(each) for each in first.grads]
    found.append(("a grad_output of zeros", nothing, torch.zeros_like(u), largest, SCALED))
    return found


def _in_float16(gradient: Tensor) -> bool:
    """True if float16 represents every number of a gradient."""
    numbers = coordinates(gradient)
    return torch.equal(numbers.half().to(numbers.dtype), numbers)
