"""Conventions: gradients that an author has written to differ from the right gradients on purpose.

A class declares no convention, but its values show one: a step function has a surrogate gradient, and the
gradient of a function that draws random numbers may be right only in expectation. Each convention is a
predicate; the first that is true decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from opsmith.checking.causes import CAUSES
from opsmith.checking.diagnosis.diagnose import CONSTANT
from opsmith.checking.exceptions import Overlooking, error_words
from opsmith.checking.numerics.autodiff import Results
from opsmith.checking.numerics.directional import DirectionalFunction, coordinates
from opsmith.checking.processes.watchdog import time_limit
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
from opsmith.checking.report import Failure, Given
from opsmith.checking.run import Run, copies
from opsmith.checking.samples.domain import are_same, asked
from opsmith.checking.samples.forms import symmetric_inputs
from opsmith.checking.samples.grad_outputs import plain_grad_outputs
from opsmith.checking.samples.sample import Sample, shown_sample
from opsmith.checking.side_effects.canaries import form_of
from opsmith.checking.subject import Subject
from opsmith.core.cached_property import cached_property
from opsmith.judging.attribution import calls_operator, is_own
from opsmith.judging.compare import all_finite, is_close, largest_magnitude, same_bits
from opsmith.judging.tensors import is_inexact

NAME = "gradient"


@dataclass(frozen=True, eq=False)
class ShownGradient(Run):
    """A class's gradient by one input, on the sample on which a failure shows it."""

    @property
    def argnum(self) -> int:
        """Position of the input."""
        return self.argnums[0]

    @property
    def double(self) -> list[Any]:
        """The arguments in float64, in fresh memory that a call may overwrite."""
        return self.sample.in_double()

    @cached_property
    def plain(self) -> Results:
        """The forward, as a function of flat arguments."""
        return self.subject.plain(self.sample)

    @cached_property
    def grads(self) -> list[Tensor | None]:
        """The grad_output of each result."""
        return plain_grad_outputs(self.subject, self.sample).in_double()

    @cached_property
    def got(self) -> Tensor:
        """The gradient."""
        return Backward(self)([*self.double, *self.grads])[0]

    @cached_property
    def right(self) -> RightGradient:
        """The right gradient."""
        own = RightGradients(self.subject, self.sample, NAME, by=self.argnums)
        return own.one(self.argnum, plain_grad_outputs(self.subject, self.sample))

    def is_sound(self) -> bool:
        """True if it is finite, and either zero or changed by a different grad_output."""
        others = [None if each is None else -1.5 * each for each in self.grads]
        other = Backward(self)([*self.double, *others])[0]
        moves = not self.got.any() or not torch.equal(self.got, other)
        return all_finite(self.got) and all_finite(other) and moves

    def is_shown(self) -> bool:
        """True if it is wrong for these numbers, and not only for others."""
        return self.right.judge(self.got) is not None

    def is_alike_in(self, dtype: torch.dtype) -> bool:
        """True if it is the same in another dtype, except for rounding."""
        grads = plain_grad_outputs(self.subject, self.sample).beside(self.sample)(dtype, self.device)
        return share_off(Backward(self)(grads)[0], self.got) <= THOUSANDTH

    def among_symmetric(self) -> ShownGradient | None:
        """The gradient if the input is made symmetric first; None if it is not symmetric in every sample."""
        meant = {self.sample.labels[self.argnum]} & symmetric_inputs(self.subject)
        subject = replace(self.subject, symmetric=self.subject.symmetric | meant)
        return replace(self, subject=subject) if meant else None


Predicate = Callable[[ShownGradient], bool]


class Convention(NamedTuple):
    """A reason why an author's gradient differs from the right gradient.

    Args:
        words: Description of the gradient, for messages.
        holds: Returns True for a gradient that follows it.
        given: The circumstance of a failure that it explains.
        of_numbers: True if it explains only numbers, not a second order or a nonlinear gradient.
        elsewhere: True if it also explains special values, at which alone the gradient is wrong.
    """

    words: str
    holds: Predicate
    given: Given = "unpromised"
    of_numbers: bool = False
    elsewhere: bool = False


def by_convention(failure: Failure, subject: Subject, special: Sequence[Any] = ()) -> Failure:
    """The failure of a class, in the circumstance of the first convention that its gradient follows.

    Args:
        special: The arguments at which it is shown, if these are not the sample's.
    """
    sample = shown_sample(failure, subject.samples)
    numeric = CAUSES[failure.cause].numeric
    explained = numeric or CAUSES[failure.cause].meant
    if sample is None or not subject.kind.own_forward or failure.input not in sample.labels or not explained:
        return failure
    argnum = sample.labels.index(failure.input)
    gradient = ShownGradient(subject, sample, NAME, by=(argnum,))
    needed = [ShownGradient.is_sound, *([ShownGradient.is_shown] if numeric else [])]
    if {"float32", "float64"} <= {*failure.dtypes}:
        needed.append(partial(ShownGradient.is_alike_in, dtype=torch.float32))
    tried = [each for each in CONVENTIONS if numeric or not each.of_numbers]
    try:
        with time_limit(math.inf):  # the fault is known
            found = _followed(gradient, needed, tried)
            if found is None and special:
                there = replace(gradient, sample=replace(sample, flat=tuple(special), copies={}))
                found = _followed(there, needed, [each for each in tried if each.elsewhere])
    except Exception as error:
        if not is_own(error):
            raise
        words = (
            f"opsmith itself failed when it looked for a convention that explains this ({error_words(error)})"
        )
        return replace(failure, message=f"{failure.message}; {words}: please report this error")
    if found is None:
        return failure
    words = "" if found.words in failure.message else f"; {found.words}"
    return replace(failure, message=f"{failure.message}{words}", given=found.given)


def _followed(
    gradient: ShownGradient, needed: Sequence[Predicate], tried: Sequence[Convention]
) -> Convention | None:
    sound = all(_holds(each, gradient) for each in needed)
    return next((each for each in tried if sound and _holds(each.holds, gradient)), None)


def _holds(holds: Predicate, gradient: ShownGradient) -> bool:
    with Overlooking():
        return holds(gradient)
    return False


def returns_arguments(gradient: ShownGradient) -> bool:
    """True if each result is an unchanged argument in its own memory, so that nothing is computed."""
    with torch.no_grad():
        flat = gradient.flat()
        before = copies([each if isinstance(each, Tensor) else None for each in flat])
        results = [each for each in gradient.subject.call(gradient.sample, flat) if isinstance(each, Tensor)]
    kept = {
        form_of(each)
        for each, had in zip(flat, before, strict=True)
        if had is not None and had.numel() and same_bits(each, had)
    }
    return bool(results) and all(form_of(each) in kept for each in results)


OTHERS = (-1.0, 16.0, -16.0)
"""Factors that move numbers to different steps of a step function."""


def is_of_a_step(gradient: ShownGradient) -> bool:
    """True if the right gradient is zero, of a step function or of an argument that no result reads."""
    place = gradient.subject, gradient.sample, gradient.argnum
    return gradient.right.is_zero and (_is_step_function(*place) or _stands_in(*place))


def _is_step_function(subject: Subject, sample: Sample, argnum: int) -> bool:
    """True if different values of an input give different results, each constant near the value."""
    value, found = sample.flat[argnum], asked(subject, sample, {}, wide=True)
    differs = False
    for factor in OTHERS:
        other = replace(sample, flat=sample.with_value(argnum, value * factor), copies={})
        with Overlooking():
            grads = plain_grad_outputs(subject, other)
            if not RightGradients(subject, other, NAME, by=(argnum,)).one(argnum, grads).is_zero:
                return False
            differs = differs or not are_same(found, asked(subject, other, {}, wide=True))
    return differs


def _stands_in(subject: Subject, sample: Sample, argnum: int) -> bool:
    """True if no result changes with an input that requires a gradient: the gradient is a surrogate."""
    asked_for = [at for at in sample.inexact if sample.flat[at].requires_grad]
    rights, grads = RightGradients(subject, sample, NAME), plain_grad_outputs(subject, sample)
    return argnum in asked_for and all(rights.one(at, grads).is_zero for at in asked_for)


def is_of_the_forward_as_written(gradient: ShownGradient) -> bool:
    """True if it is autograd's gradient through a forward that hides a dependence, as by `.detach()`."""
    right = gradient.right
    return not right.trusted and right.among.recorded and agree(gradient.got, right.through_reference)


class StraightThrough(TorchFunctionMode):
    """A mode in which functions that round have the gradient of the identity.

    Args:
        rounds: False if these functions also return their argument unchanged.

    Attributes:
        used: True if such a function was called.
    """

    def __init__(self, *, rounds: bool = True) -> None:
        super().__init__()
        self.rounds, self.used = rounds, False

    @calls_operator
    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute a function; give a function that rounds the gradient of the identity."""
        name, given = getattr(function, "__name__", ""), dict(kwargs or {})
        x = args[0] if args else given.pop("input", None)
        if name.removesuffix("_") not in ROUNDING or not is_inexact(x):
            return function(*args, **(kwargs or {}))
        self.used |= x.requires_grad  # only by the differentiated input
        if not self.rounds:
            return x
        rounded = getattr(torch, name.removesuffix("_"))(x.detach(), *args[1:], **given)
        passed = rounded + (x - x.detach())
        return x.copy_(passed) if name.endswith("_") else passed


ROUNDING = frozenset({"round", "floor", "ceil", "trunc", "fix", "sign"})
"""Functions of torch that round; in-place functions end with an underscore."""


def passes_straight(gradient: ShownGradient) -> bool:
    """True if a forward rounds, and a gradient passes through this, leaves it out, or is a grad_output."""
    got, grads = gradient.got, gradient.grads
    with StraightThrough() as mode:
        passed = Backward(gradient, gradient.plain)([*gradient.double, *grads])[0]
    alike = [each for each in (passed, *grads) if each is not None and each.shape == got.shape]
    if not mode.used or any(agree(got, each) for each in alike):
        return bool(mode.used)
    with StraightThrough(rounds=False):
        smooth = numerical(gradient.subject, gradient.sample, gradient.double, gradient.argnum, grads)
    return smooth.has_estimate and smooth.judge(got) is None


GATED = (1.0, -1.0, 2.0**10, -(2.0**10))
"""Factors on grad_outputs that open and close gates: other signs, and sizes above a threshold."""


def is_gated(gradient: ShownGradient) -> bool:
    """True if each element is right or zero, and grad_output decides which, as in guided backpropagation.

    Where no result moves with an element, as outside of a clamp, a grad_output that leads back may pass.
    """
    right, grads = gradient.right.known, gradient.grads
    if any(each is not None and each.is_complex() for each in (right, *grads)):
        return False
    known, bound = right.isfinite(), SAME * largest_magnitude(right.nan_to_num())
    moving = known & (right.abs() > bound)
    alike = [(at, x) for at, x in enumerate(grads) if x is not None and x.shape == right.shape]
    zero, passed, straight = list[Tensor](), list[Tensor](), list[Tensor]()
    for factor in GATED:
        given = [None if each is None else factor * each for each in grads]
        got = Backward(gradient)([*gradient.double, *given])[0] / factor
        own = [is_close(got, x, bound) & _leads_back(gradient, at, factor * x) for at, x in alike]
        zero.append(got == 0)
        passed.append(is_close(got, right, bound))
        straight.append(~moving & ~zero[-1] & torch.stack([torch.zeros_like(known), *own]).any(0))
    closed, opened, led = (torch.stack(each) for each in (zero, passed, straight))
    if bool((known & ~(closed | opened | led)).any()):
        return False
    gated = closed.any(0) & (moving | led.any(0))
    return bool((opened.any(0) | ~moving).all()) and not bool(led.all(0).any()) and bool(gated.any())


FAR = (1.0, 16.0, 256.0)
"""Steps, as shares of the largest element, that lead back from outside of a clamp."""


def _leads_back(gradient: ShownGradient, at: int, grad: Tensor) -> Tensor:
    """Mark the elements whose result changes if each element moves far against a grad_output."""
    flat, argnum = gradient.double, gradient.argnum
    found = torch.zeros_like(grad, dtype=torch.bool)
    with torch.no_grad():
        here = gradient.plain(flat)[at]
        for far in FAR:
            moved = gradient.double
            moved[argnum] = flat[argnum] - far * (1 + largest_magnitude(flat[argnum])) * grad.sign()
            found |= (gradient.plain(moved)[at] - here) * grad < 0
    return found


DRAWN = (256, 1024, 4096)
"""Numbers of draws over which gradients are averaged; a larger number is used if a smaller decides
nothing."""

UNBIASED = 5.0
"""Maximum mean error of a gradient that is right in expectation, in standard errors."""

SHARP = 0.1
"""Maximum standard error, as a share of the largest element of the mean gradient."""


def is_right_on_average(gradient: ShownGradient) -> bool:
    """True if the forward draws, and the gradient is right in the mean over draws.

    The loss is `(result ** 2).sum() / 2`, whose grad_output is the result, since a backward that only leaves
    out the drawn numbers is also right on average for a constant grad_output.
    """
    if not gradient.subject.draws or gradient.subject.steady is not None:
        return False
    pairs, seed = list[tuple[Tensor, Tensor]](), gradient.subject.seed
    for count in DRAWN:
        pairs += [_drawn(gradient, seed + at) for at in range(len(pairs), count)]
        error = torch.stack([got - right for got, right in pairs])
        off, spread = error.mean(0).abs(), error.std(0) / count**0.5
        size = largest_magnitude(torch.stack([right for _, right in pairs]).mean(0))
        hopeless = spread > SHARP * size * (DRAWN[-1] / count) ** 0.5
        if bool((off > UNBIASED * spread + SAME * size).any()) or bool(hopeless.any()):
            return False
        if bool((spread <= SHARP * size).all()):
            return True
    return False


def _drawn(gradient: ShownGradient, seed: int) -> tuple[Tensor, Tensor]:
    """The gradient and the right gradient, for the same draw."""
    run = replace(gradient, subject=replace(gradient.subject, seed=seed))
    grads = [each.detach() if is_inexact(each) else None for each in run.call(run.double).results]
    got, right = Backward(run), Backward(run, run.plain)
    return got([*run.double, *grads])[0], right([*run.double, *grads])[0]


LARGE_STEP = 1e-2
"""Step, as a share of each element, that is large enough to hide the missing digits of a forward."""

OVER_IT = 0.05
"""Maximum error of a gradient over such steps, as a share of the gradient."""

BETTER = 4.0
"""Factor by which the derivative's error at the point itself must be larger."""

DIRECTIONS = 12
"""Number of random directions of such steps."""


def is_right_over_large_steps(gradient: ShownGradient) -> bool:
    """True if a gradient is right over large steps, and the derivative at the point is not.

    The results of a search change in steps, or with its bounds.
    """
    shown = gradient.among_symmetric() or gradient
    off: dict[str, list[float]] = {"gradient": [], "derivative": []}
    line = DirectionalFunction(shown.plain, shown.double, shown.argnum, shown.grads)
    generator, got = shown.subject.generator(), coordinates(shown.got)
    for way in (line.direction(generator) for _ in range(DIRECTIONS)):
        change = (line.along(way, LARGE_STEP) - line.along(way, -LARGE_STEP)).sum() / (2 * LARGE_STEP)
        size = float((got * way).abs().sum()) or math.nan
        for name, each in (("gradient", got), ("derivative", coordinates(shown.right.known))):
            off[name].append(abs(float(change - (each * way).sum())) / size)
    worst, derivative = (float(torch.tensor(off[name]).max()) for name in off)  # nan stays nan
    return worst <= OVER_IT and derivative > BETTER * worst


def is_right_among_symmetric(gradient: ShownGradient) -> bool:
    """True if the input is symmetric in every sample, and its gradient is right among such matrices."""
    among = gradient.among_symmetric()
    if among is None or not among.right.is_known:
        return False
    return among.right.judge(among.got) is None or share_off(among.got, among.right.known) <= THOUSANDTH


CONVENTIONS = (
    Convention(
        "every sample has a symmetric matrix there, and the gradient is right along symmetric "
        "matrices: if other matrices are allowed, add a sample with a matrix that is not symmetric",
        is_right_among_symmetric,
        "strained",
        of_numbers=True,
    ),
    Convention(
        "the forward only returns arguments, so the backward is the purpose of the class", returns_arguments
    ),
    Convention(CONSTANT, is_of_a_step),
    Convention(
        "it is autograd's gradient through the forward, and the forward hides a dependence "
        "(`.detach()`, `no_grad`)",
        is_of_the_forward_as_written,
    ),
    Convention(
        "it is the gradient of a straight-through estimator: it passes through the rounding unchanged",
        passes_straight,
    ),
    Convention(
        "the grad_output decides which of its elements pass and which are zero, as in guided backpropagation",
        is_gated,
        elsewhere=True,
    ),
    Convention("it is right on average over draws", is_right_on_average, of_numbers=True),
    Convention(
        f"over steps of {LARGE_STEP:g} times each element, it is right: the forward itself has few "
        "exact digits",
        is_right_over_large_steps,
        of_numbers=True,
    ),
)
"""The conventions; the first that is true explains a failure."""
