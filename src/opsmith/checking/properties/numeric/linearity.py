"""Linearity of a backward in grad_output, which torch assumes when it adds up gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import Overlooking
from opsmith.checking.numerics.directional import represents
from opsmith.checking.properties.numeric.conventions import by_convention
from opsmith.checking.properties.numeric.gradient_truth import Backward, share_off
from opsmith.checking.property import Findings, Property, Skipped
from opsmith.checking.run import Run, each_run
from opsmith.checking.samples.grad_outputs import plain_grad_outputs
from opsmith.checking.subject import Subject
from opsmith.judging.answer import Answer, Combination
from opsmith.judging.compare import all_finite, largest_magnitude
from opsmith.judging.judge import judge

NAME = "linearity"


def run(subject: Subject) -> Findings:
    """Compare the gradient of every input for grad_outputs a u + b v, and for small and large ones."""
    if subject.specification.gradients.surrogate:
        yield Skipped("the gradients are surrogates; the property `surrogate` checks their linearity")
    elif not subject.linear:
        yield Skipped("the operator is declared not to be linear in grad_output")
    else:
        compared: list[bool] = []
        yield from each_run(NAME, partial(_run, compared=compared), subject)
        if not any(compared):
            yield NOT_COMPARED if compared else Skipped("there is nothing to differentiate")


NOT_COMPARED = Skipped("no backward gives numbers to compare: `gradient` reports the fault")


def _run(run: Run, compared: list[bool]) -> Findings:
    """Check every input, and append to `compared` if its gradients have numbers to compare."""
    for argnum in run.argnums:
        found = not_linear(run, argnum)
        compared.append(found is not NOT_COMPARED)
        if isinstance(found, tuple):
            cause, words, evidence = found
            message = f"the gradient of `{run.sample.labels[argnum]}` {words}"
            if cause == "nonlinear-grad" and run.subject.kind.own_forward:
                message += MEANT
            evidence = {"sample": f"{run} in float64", **evidence}
            minor = evidence.get(OFF, math.inf) <= FEW
            failure = run.failure(argnum, cause, message, evidence=evidence, minor=minor)
            yield by_convention(failure, run.subject)


def not_linear(run: Run, argnum: int) -> tuple[str, str, dict[str, Any]] | Skipped | None:
    """The cause, words and evidence for a gradient that is not linear in grad_output, or ignores it."""
    subject, sample, backward = run.subject, run.sample, Backward(run.alone(argnum))

    def answer(grads: Grads) -> Answer:
        values = [*sample.in_double(), *grads]
        return backward.computation(values, stream=1).at(values, torch.float64)[0]

    first, generator = plain_grad_outputs(subject, sample).in_double(), subject.generator(1)
    second = [
        None if each is None else torch.randn(each.shape, generator=generator, dtype=each.dtype)
        for each in first
    ]
    found: list[Answer] = []
    with Overlooking():  # `gradient` reports exceptions, and missing and nan gradients too
        if backward.or_none([*sample.in_double(), *first])[0] is not None:
            found = [answer(grads) for grads in (first, second)]
    values = [each.tensor for each in found]
    if not values or not values[0].numel() or not all(map(all_finite, values)):
        return NOT_COMPARED
    if torch.equal(*values) and all(judge(torch.zeros_like(values[0]), each).wrong for each in found):
        return "ignores-grad-output", SAME, {}
    for words, grads, terms, tolerated in _combined(first, second, *found):
        combined = answer(grads)
        verdict = judge(combined.tensor, Combination(terms, combined, tolerated))
        if verdict.difference is not None:
            text = f"is not linear in grad_output: for {words}, {verdict}; {WHY}"
            right = torch.stack([factor * each.tensor for factor, each in terms]).sum(0)
            evidence = {**verdict.difference.evidence(), OFF: share_off(combined.tensor, right)}
            return "nonlinear-grad", text, evidence
    return None


OFF = "share off"
"""Evidence of the largest error, as a share of the largest element."""

MEANT = '; if you intend this, declare it: `opsmith.adopt(..., kind="nonlinear")`'

FEW = 1e-2
"""Maximum share that is minor: an iteration to an absolute tolerance loses digits of small gradients."""

SAME = "is the same, bit by bit, for two different grad_outputs: multiply by `grad`"


LINEARITY = Property(
    NAME,
    "the gradient is linear in grad_output, and depends on it",
    run,
    inputs="every",
    traits=("about-results", "explains-gradients", "sends-gradients"),
)


FACTORS = (0.75, -1.5)
SCALES = (2.0**-10, 2.0**10)
"""Factors for small and large gradients, since a backward that clips is linear in between. They are powers of
two: then rounding is the same, and the tolerance can be small."""

FLOAT16_SCALES = (2.0**-2, 2.0**2)
"""Bounds for a backward that computes in float16, which overflows at 65504 and loses digits below 6e-5."""

SUMMED = 2.0**-6
"""Allowed relative error of a sum: a backward that computes in bfloat16 rounds by 2**-9. A function that is
not additive, such as a norm or a maximum, is off by much more."""

SCALED = torch.finfo(torch.float64).eps ** 0.25
"""Allowed relative error of a multiple: a nearly singular backward may lose three quarters of its digits."""

WHY = "torch adds up gradients before and after an operator, and assumes that each backward is linear"

Grads = list[Tensor | None]
Terms = tuple[tuple[float, Answer], ...]


def _combined(grads: Grads, others: Grads, u: Answer, v: Answer) -> Iterator[tuple[str, Grads, Terms, float]]:
    """Combinations of grad_outputs: description, values, the gradient that follows, and its allowed error."""
    a, b = FACTORS
    mixed = [None if x is None or y is None else a * x + b * y for x, y in zip(grads, others, strict=True)]
    largest = largest_magnitude(u.tensor)
    size = abs(a) * largest + abs(b) * largest_magnitude(v.tensor)
    words = f"{a} u + ({b}) v, compared with the gradients for u and for v"
    yield words, mixed, ((a, u), (b, v)), SUMMED * size
    scales, tolerated = (FLOAT16_SCALES, SUMMED) if represents(torch.float16, u.tensor) else (SCALES, SCALED)
    for scale in scales:
        scaled = [None if each is None else scale * each for each in grads]
        yield f"{scale:g} times a grad_output", scaled, ((scale, u),), tolerated * scale * largest
    nothing = [None if each is None else torch.zeros_like(each) for each in grads]
    yield "a grad_output of zeros", nothing, ((0.0, u),), SCALED * largest
