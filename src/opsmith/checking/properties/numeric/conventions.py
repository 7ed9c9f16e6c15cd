"""Conventions: gradients that differ from the right ones, and that an author has written on purpose.

A class declares nothing. If its forward is a step function, whose right gradient is zero, another one is a
surrogate. If its forward draws, a gradient may be right in expectation alone. If it is exact to few digits,
as a search in steps, a gradient may be that of the exact one. If every sample has a symmetric matrix, the
symmetric part of a gradient counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from opsmith.checking.causes import CAUSES
from opsmith.checking.diagnosis.diagnose import CONSTANT
from opsmith.checking.exceptions import Overlooking
from opsmith.checking.numerics.directional import DirectionalFunction, coordinates
from opsmith.checking.properties.numeric.gradient_truth import (
    SAME,
    THOUSANDTH,
    Backward,
    RightGradient,
    RightGradients,
    agree,
    numerical,
    share_off,
)
from opsmith.checking.report import Failure
from opsmith.checking.run import Run
from opsmith.checking.samples.domain import are_same, asked
from opsmith.checking.samples.forms import symmetric_inputs
from opsmith.checking.samples.grad_outputs import plain_grad_outputs
from opsmith.checking.samples.sample import Sample, shown_sample
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.checking.subject import Subject
from opsmith.judging.compare import all_finite, largest_magnitude
from opsmith.judging.tensors import CPU, is_inexact

NAME = "gradient"

OTHERS = (-1.0, 16.0, -16.0)
"""Factors that take numbers to other steps of a step function."""


def as_surrogate(failure: Failure, subject: Subject, rights: Sequence[RightGradient] = ()) -> Failure:
    """The failure of a class, as one that nobody promised if its gradient is a surrogate of a step function.

    Args:
        failure: The failure.
        subject: The subject of the check.
        rights: The right gradients by the input, on each sample that it was differentiated by; by default
            the one on the sample of the failure.
    """
    sample = shown_sample(str(failure.evidence.get("sample", "")), subject.samples)
    of_numbers = CAUSES[failure.cause].numeric or failure.cause in ("nonlinear-grad", "second-order")
    if sample is None or not subject.kind.own_forward or not of_numbers:
        return failure
    if failure.input not in sample.labels:
        return failure
    argnum = sample.labels.index(failure.input)
    if not rights:
        own = RightGradients(subject, sample, NAME, by=(argnum,))
        rights = [own.one(argnum, plain_grad_outputs(subject, sample))]
    if _returns_arguments(subject, sample):
        words, meant = ROUTES, True
    elif all(right.is_zero for right in rights):
        words, places = CONSTANT, [(right.among.sample, right.argnum) for right in rights]
        meant = any(_is_step_function(subject, *place) for place in places)
        meant = meant or any(_stands_in(subject, *place) for place in places)
    else:
        words, meant = STRAIGHT, _passes_straight(subject, sample, argnum)
    if not meant or not _follows_grad_output(subject, sample, argnum):
        return failure
    message = failure.message if words in failure.message else f"{failure.message}; {words}"
    return replace(failure, message=message, given="unpromised")


ROUTES = "its forward only returns arguments, so that its backward is what it is for"


def _returns_arguments(subject: Subject, sample: Sample) -> bool:
    """True if each result is an argument, or lies in the memory of one: nothing is computed."""
    flat = sample.in_double()
    with Overlooking(), without_warnings(), torch.no_grad():
        results = [each for each in subject.call(sample, flat) if isinstance(each, Tensor)]
        kept = {(each.data_ptr(), each.numel()) for each in flat if isinstance(each, Tensor) and each.numel()}
        return bool(results) and all((each.data_ptr(), each.numel()) in kept for each in results)
    return False


def _follows_grad_output(subject: Subject, sample: Sample, argnum: int) -> bool:
    """True if a gradient is finite, and another one for another grad_output."""
    run, flat = Run(subject, sample, NAME, by=(argnum,)), sample.in_double()
    grads = plain_grad_outputs(subject, sample).in_double()
    with Overlooking(), without_warnings():
        given = [[None if each is None else factor * each for each in grads] for factor in (1.0, -1.5)]
        one, other = (Backward(run)([*flat, *each])[0] for each in given)
        return all_finite(one) and all_finite(other) and not torch.equal(one, other)
    return False


STRAIGHT = "it is the gradient that passes straight through what rounds, as a straight-through estimator's"


class StraightThrough(TorchFunctionMode):
    """A mode in which functions that round have the gradient of the identity.

    Args:
        rounds: False if they return their argument, too.

    Attributes:
        used: True if one was called.
    """

    def __init__(self, *, rounds: bool = True) -> None:
        super().__init__()
        self.rounds, self.used = rounds, False

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute a function, or one that rounds with another gradient."""
        name = getattr(function, "__name__", "")
        if name.removesuffix("_") not in ROUNDING or not args or not is_inexact(args[0]):
            return function(*args, **(kwargs or {}))
        self.used, (x, *more) = True, args
        if not self.rounds:
            return x
        rounded = getattr(torch, name.removesuffix("_"))(x.detach(), *more, **(kwargs or {}))
        passed = rounded + (x - x.detach())
        return x.copy_(passed) if name.endswith("_") else passed


ROUNDING = frozenset({"round", "floor", "ceil", "trunc", "fix", "sign"})
"""Functions of torch that round, in place with an underscore."""


def _passes_straight(subject: Subject, sample: Sample, argnum: int) -> bool:
    """True if a forward rounds, and a gradient passes through that, or leaves it out, or is a grad_output."""
    run, grads = Run(subject, sample, NAME, by=(argnum,)), plain_grad_outputs(subject, sample).in_double()
    flat, plain = sample.in_double(), subject.plain(sample)
    with Overlooking(), without_warnings():
        got = Backward(run)([*flat, *grads])[0]
        with StraightThrough() as mode:
            passed = Backward(run, plain)([*flat, *grads])[0]
        alike = [each for each in (passed, *grads) if each is not None and each.shape == got.shape]
        if not mode.used or any(agree(got, each) for each in alike):
            return bool(mode.used)
        with StraightThrough(rounds=False):
            smooth = numerical(subject, sample, flat, argnum, grads)
        return smooth.has_estimate and smooth.judge(got) is None
    return False


def _stands_in(subject: Subject, sample: Sample, argnum: int) -> bool:
    """True if no result moves with any input for which the author asks for a gradient: another is meant."""
    asked_for = [at for at in sample.inexact if sample.flat[at].requires_grad]
    if argnum not in asked_for:
        return False
    rights, grads = RightGradients(subject, sample, NAME), plain_grad_outputs(subject, sample)
    return all(rights.one(at, grads).is_zero for at in asked_for)


def _is_step_function(subject: Subject, sample: Sample, argnum: int) -> bool:
    """True if other numbers of an input give other results, which do not move with it either."""
    value, found = sample.flat[argnum], asked(subject, sample, {}, wide=True)
    differs = False
    for factor in OTHERS:
        other = replace(sample, flat=sample.with_value(argnum, value * factor), copies={})
        with Overlooking(), without_warnings():
            grads = plain_grad_outputs(subject, other)
            if not RightGradients(subject, other, NAME, by=(argnum,)).one(argnum, grads).is_zero:
                return False
            differs = differs or not are_same(found, asked(subject, other, {}, wide=True))
    return differs


DRAWN = (256, 1024, 4096)
"""Numbers of draws over which gradients are averaged: more where fewer do not tell."""

UNBIASED = 5.0
"""Largest mean error of a gradient that is right in expectation, in standard errors."""

SHARP = 0.1
"""Largest such standard error, as a share of the largest element of the mean gradient."""


def as_estimator(failure: Failure, subject: Subject) -> Failure:
    """The failure of a class that draws, as one that nobody promised if the gradient is right on average.

    The mean over draws is compared for the loss `(result ** 2).sum() / 2`, whose grad_output is the result: a
    backward that merely leaves the drawn numbers out is right on average for a constant grad_output, too.
    """
    sample = shown_sample(str(failure.evidence.get("sample", "")), subject.samples)
    if sample is None or not subject.kind.own_forward or not subject.draws or subject.steady is not None:
        return failure
    if not CAUSES[failure.cause].numeric or failure.input not in sample.labels:
        return failure
    argnum, pairs = sample.labels.index(failure.input), list[tuple[Tensor, Tensor]]()
    with Overlooking(), without_warnings():
        for count in DRAWN:
            seeds = range(subject.seed + len(pairs), subject.seed + count)
            pairs += [_drawn(replace(subject, seed=seed), sample, argnum) for seed in seeds]
            error = torch.stack([got - right for got, right in pairs])
            off, spread = error.mean(0).abs(), error.std(0) / count**0.5
            size = largest_magnitude(torch.stack([right for _, right in pairs]).mean(0))
            if bool((off > UNBIASED * spread + SAME * size).any()):
                return failure
            if bool((spread <= SHARP * size).all()):
                words = f"over {count} draws it is right on average"
                return replace(failure, message=f"{failure.message}; {words}", given="unpromised")
    return failure


def _drawn(subject: Subject, sample: Sample, argnum: int) -> tuple[Tensor, Tensor]:
    """The gradient by an input and the right one, for the same draw."""
    run, flat = Run(subject, sample, NAME, by=(argnum,)), sample.in_double()
    grads = [each.detach() if is_inexact(each) else None for each in run.call(flat).results]
    got, right = Backward(run), Backward(run, subject.plain(sample))
    return got([*flat, *grads])[0], right([*flat, *grads])[0]


LARGE_STEP = 1e-2
"""Step, as a share of each element, over which the digits that a forward lacks do not show."""

OVER_IT, BETTER = 0.05, 4.0
"""Largest error of a gradient over such steps, as a share of it, and how many times that of the derivative
at the point must be larger."""

DIRECTIONS = 12
"""Number of random directions of such steps."""


def as_solver(failure: Failure, subject: Subject) -> Failure:
    """The failure of a class whose forward is a search to few digits, as one that nobody promised.

    Its results move in steps, or with the bounds of the search, so that their derivative at a point is
    another one than over a large step, for which the gradient is right.
    """
    sample = shown_sample(str(failure.evidence.get("sample", "")), subject.samples)
    if sample is None or not subject.kind.own_forward or not CAUSES[failure.cause].numeric:
        return failure
    if failure.input not in sample.labels or failure.given == "unpromised":
        return failure
    subject = _among_symmetric(subject, failure.input)
    argnum, flat, plain = sample.labels.index(failure.input), sample.in_double(), subject.plain(sample)
    grads, generator = plain_grad_outputs(subject, sample), subject.generator()
    with Overlooking(), without_warnings():
        got = coordinates(Backward(Run(subject, sample, NAME, by=(argnum,)))([*flat, *grads.in_double()])[0])
        right = RightGradients(subject, sample, NAME, by=(argnum,)).one(argnum, grads)
        known = coordinates(right.through_reference if right.trusted else right.numerical.known)
        line = DirectionalFunction(plain, flat, argnum, grads.in_double())
        off = {"gradient": 0.0, "derivative": 0.0}
        for way in (line.direction(generator) for _ in range(DIRECTIONS)):
            change = (line.along(way, LARGE_STEP) - line.along(way, -LARGE_STEP)).sum() / (2 * LARGE_STEP)
            size = float((got * way).abs().sum()) or math.nan
            for name, each in (("gradient", got), ("derivative", known)):
                off[name] = max(abs(float(change - (each * way).sum())) / size, off[name])
        if off["gradient"] <= OVER_IT and off["derivative"] > BETTER * off["gradient"]:
            return replace(failure, message=f"{failure.message}; {SEARCHES}", given="unpromised")
    return failure


SEARCHES = (
    f"over steps of {LARGE_STEP:g} times each element it is right: the forward itself is exact to few digits"
)


def is_right_among_symmetric(run: Run, wrong: RightGradient) -> bool:
    """True if a gradient that is wrong is right where the matrix, symmetric in every sample, stays so.

    Args:
        run: The call.
        wrong: The right gradient, from which that of the call differs.
    """
    if wrong.label not in symmetric_inputs(run.subject):
        return False
    argnum, grads = wrong.argnum, wrong.grad_outputs
    among = replace(run.alone(argnum), subject=_among_symmetric(run.subject, wrong.label))
    with Overlooking():
        got = Backward(among)(grads.beside(run.sample)(torch.float64, CPU))[0]
        right = RightGradients(among.subject, run.sample, NAME, by=(argnum,)).one(argnum, grads)
        if not right.is_known:
            return False
        known = right.through_reference if right.trusted else right.numerical.known
        return right.judge(got) is None or share_off(got, known) <= THOUSANDTH
    return False


def _among_symmetric(subject: Subject, label: str) -> Subject:
    """The subject whose calls make an input symmetric, if every sample has a symmetric matrix there."""
    meant = {label} & symmetric_inputs(subject)
    return replace(subject, symmetric=subject.symmetric | meant) if meant else subject


SYMMETRIC = (
    "every sample has a symmetric matrix there, and along symmetric matrices it is right: where others are "
    "meant, too, add a sample with one"
)
