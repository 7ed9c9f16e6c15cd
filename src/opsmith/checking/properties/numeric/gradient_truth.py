"""Right gradients of a sample: autograd through the reference, confirmed by finite differences.

Each can be wrong. Autograd through the reference is exact, but wrong if the reference detaches a value.
Finite differences depend only on values, but have fewer digits and fail at a kink. Autograd is trusted if
finite differences do not contradict it; otherwise finite differences decide.

Some gradients are right only on the author's samples: a class may take a kernel and its flip, or a matrix and
its null vector, and use one for the other. Such gradients are right if the caller keeps the relation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import computed_in, in_all_digits
from opsmith.checking.causes import CAUSES, UNKNOWN
from opsmith.checking.exceptions import Overlooking
from opsmith.checking.numerics.autodiff import (
    Results,
    differentiate_by_ones,
    has_gradient,
    record,
    vjp,
    vjp_or_zeros,
)
from opsmith.checking.numerics.directional import DirectionalFunction
from opsmith.checking.numerics.finite_differences import NumericalGradient, agrees_along, numerical_gradient
from opsmith.checking.report import Failure
from opsmith.checking.run import Run
from opsmith.checking.samples.batches import all_finite
from opsmith.checking.samples.domain import are_same
from opsmith.checking.samples.grad_outputs import GradOutputs, plain_grad_outputs
from opsmith.checking.samples.sample import Sample, shown_sample
from opsmith.checking.samples.variation_kinds import is_number
from opsmith.checking.subject import Subject
from opsmith.core.cached_property import cached_property
from opsmith.judging.answer import Answer, Computation
from opsmith.judging.compare import Difference, is_close, largest_magnitude, same_bits
from opsmith.judging.constants import half_of_digits
from opsmith.judging.judge import judge
from opsmith.judging.tensors import CPU, is_inexact

Grads = Sequence[Tensor | None]


SPOT_CHECK = 8
"""Number of elements that a spot check moves one at a time."""


@dataclass(frozen=True)
class Backward:
    """Gradients by some inputs, as a function of all arguments of a call, followed by its grad_outputs.

    Args:
        run: The call, with the inputs that require a gradient.
        function: Function to differentiate, such as the reference; None for the call itself.
    """

    run: Run
    function: Results | None = None

    def __call__(self, values: Sequence[Any]) -> list[Tensor]:
        """The gradients; zeros if autograd returns none."""
        return in_all_digits(self.run.subject, lambda given: vjp_or_zeros(*self._split(given)))(values)

    def or_none(self, values: Sequence[Any]) -> list[Tensor | None]:
        """The gradients; None if autograd returns none."""
        return in_all_digits(self.run.subject, lambda given: vjp(*self._split(given)))(values)

    def _split(self, values: Sequence[Any]) -> tuple[Results, Sequence[Any], Sequence[int], Grads]:
        subject, sample = self.run.subject, self.run.sample
        count, function = len(sample.flat), self.function or partial(subject.call, sample)
        return function, values[:count], self.run.argnums, values[count:]

    def computation(self, values: Sequence[Any], stream: int = 0, **options: Any) -> Computation:
        """The gradients for these values as right answers, with the bounds of their rounding errors.

        Args:
            values: Arguments and grad_outputs.
            stream: Stream of the random moves.
            options: As for `Computation.of`.
        """
        subject, by_reference = self.run.subject, self.function is not None
        known = partial(computed_in, subject, self.run.sample, by_reference=by_reference)
        options = {"computed_in": known, **options}
        return Computation.of(self, values, subject.generator(stream), **options)


@dataclass(frozen=True, eq=False)
class RightGradients(Run):
    """The right gradients of one sample by some inputs.

    Args:
        confirmed: True if finite differences have confirmed autograd through the reference on earlier
            samples, so that they need not be computed again.
        spot_checked: True if a few elements and random directions suffice, unless they contradict autograd
            through the reference.
    """

    confirmed: bool = False
    spot_checked: bool = False
    _known: dict[tuple[int, str], RightGradient] = field(default_factory=dict)
    _computations: dict[tuple[str, bool], Computation] = field(default_factory=dict)

    @cached_property
    def plain(self) -> Results:
        """The reference, as a function of flat arguments."""
        return in_all_digits(self.subject, self.subject.plain(self.sample))

    def one(self, argnum: int, grad_outputs: GradOutputs) -> RightGradient:
        """The right gradient by one input, for some grad_outputs."""
        return self._known.setdefault((argnum, grad_outputs.name), RightGradient(self, argnum, grad_outputs))

    @property
    def recorded(self) -> bool:
        """True if autograd records the reference, and the reference is not the operator itself."""
        recorded = partial(_is_recorded, self.subject, self.sample, self.argnums)
        return self.subject.once(f"recorded by {self.argnums}", self.sample, recorded)

    def computation(self, grad_outputs: GradOutputs, *, by_reference: bool) -> Computation:
        """The right gradients in any dtype: autograd's through the reference, or the operator's own."""
        key = (grad_outputs.name, by_reference)
        if key not in self._computations:
            backward = Backward(self, self.plain if by_reference else None)
            values = [*self.sample.in_double(), *grad_outputs.in_double()]
            self._computations[key] = backward.computation(
                values, has_truth=self.subject.has_truth, usual=self.usual_size
            )
        return self._computations[key]

    @cached_property
    def has_finite_results(self) -> bool:
        """True if every number of every result is finite."""
        with torch.no_grad():
            return all_finite(self.plain(self.sample.in_double()))

    def usual_size(self, position: int) -> float:
        """Usual size of gradients by an input on the author's samples, or of the results over the input."""
        label, subject, found = self.sample.labels[self.argnums[position]], self.subject, [0.0]
        for sample in (self.sample, *subject.samples):
            argnum = sample.labels.index(label) if label in sample.labels else -1
            if argnum in sample.inexact and (sample is self.sample or not sample.origin):
                with Overlooking():  # other properties report exceptions of a reference
                    size = partial(_size_of_gradient, subject, sample, argnum)
                    found.append(subject.once(f"size of the gradient by {label}", sample, size))
        return max(size for size in found if math.isfinite(size))


def _is_recorded(subject: Subject, sample: Sample, argnums: tuple[int, ...]) -> bool:
    if subject.specification.opaque:
        return False
    plain = in_all_digits(subject, subject.plain(sample))
    if not subject.kind.own_forward:
        return any(map(has_gradient, record(plain, sample.in_double(), argnums)[2]))
    with Overlooking():  # torch runs a class's forward without grad mode: it may call `.numpy()`
        leaves, _, results = record(plain, sample.in_double(), argnums)
        differentiate_by_ones(results, [leaves[argnum] for argnum in argnums])
        return any(map(has_gradient, results))
    return False


@dataclass(frozen=True, eq=False)
class RightGradient:
    """The right gradient by one input for some grad_outputs, each part computed at its first use."""

    among: RightGradients
    argnum: int
    grad_outputs: GradOutputs

    @property
    def label(self) -> str:
        """Name of the input in messages."""
        return self.among.sample.labels[self.argnum]

    @property
    def position(self) -> int:
        """Position of the input among the inputs to differentiate by."""
        return self.among.argnums.index(self.argnum)

    @property
    def _known(self) -> tuple[list[Any], int, list[Tensor | None]]:
        """The arguments in float64, the input, and the grad_outputs."""
        return self.among.sample.in_double(), self.argnum, self.grad_outputs.in_double()

    @cached_property
    def numerical(self) -> NumericalGradient:
        """Finite differences in float64."""
        return numerical(self.among.subject, self.among.sample, *self._known)

    @cached_property
    def _few(self) -> NumericalGradient | None:
        """Differences by a few elements, if these suffice and confirm autograd."""
        if not self.among.spot_checked:
            return None
        few = numerical(self.among.subject, self.among.sample, *self._known, elements=SPOT_CHECK)
        return few if few.judge(self.through_reference) is None else None

    @cached_property
    def answer(self) -> Answer:
        """Autograd's gradient through the reference in float64, with its bounds."""
        gradients = self.among.computation(self.grad_outputs, by_reference=True)
        return gradients.twin(self.position, gradients.results[self.position], torch.float64)

    @property
    def through_reference(self) -> Tensor:
        """Autograd's gradient through the reference in float64."""
        return self.answer.tensor

    @cached_property
    def trusted(self) -> bool:
        """True if finite differences confirm autograd through the reference by the input."""
        if self.among.confirmed or not self.among.recorded:
            return self.among.confirmed
        return self._agrees_along or self._few is not None or self._differs_by_noise()

    @cached_property
    def _agrees_along(self) -> bool:
        """True if differences along random directions confirm autograd, so that no element is moved alone."""
        plain, generator = self.among.plain, self.among.subject.generator()
        return agrees_along(plain, *self._known, self.through_reference, generator=generator)

    def _differs_by_noise(self) -> bool:
        """True if differences contradict autograd only by its own noise, for example if its terms cancel."""
        found = self.through_reference
        if self.numerical.judge(found) is None:
            return True
        among, flat, grads = self.among, self.among.sample.in_double(), self.grad_outputs.in_double()
        gradient = Backward(among.alone(self.argnum), among.plain).computation([*flat, *grads])
        noise = gradient.noise(computed_in(among.subject, among.sample, by_reference=True))
        if not 0 < noise <= THOUSANDTH * among.usual_size(self.position):
            return False  # a function that jumps has noise as large as its gradients, which decides nothing
        return self.numerical.widened(noise).judge(found) is None

    @property
    def has_kink(self) -> bool:
        """True if the finite differences that confirm autograd, or decide in its place, find a kink."""
        if self.among.recorded and self._agrees_along:
            return False
        confirming = self._few if self.among.recorded else None
        return bool((confirming or self.numerical).kinks.any())

    @property
    def is_known(self) -> bool:
        """True if at least one element is known."""
        if not self.among.sample.flat[self.argnum].numel():
            return False
        return bool(self.through_reference.isfinite().any()) if self.trusted else self.numerical.has_estimate

    @property
    def known(self) -> Tensor:
        """The right gradient in float64, with nan for unknown elements."""
        return self.through_reference if self.trusted else self.numerical.known

    @property
    def is_zero(self) -> bool:
        """True if the results do not depend on the input: every known element is zero."""
        known = self.known
        along = () if self.trusted else self.numerical.along
        numbers = known[~known.isnan()]
        return numbers.numel() > 0 and not numbers.any() and not any(each.value for each in along)

    def judge(self, got: Tensor, answer: Answer | None = None) -> Difference | None:
        """The worst element of a gradient; None if no element is certainly wrong.

        An element is unknown if autograd itself returns nan, for example from zero times infinity. At a kink,
        any value between the one-sided derivatives is right.

        Args:
            got: The gradient.
            answer: The right gradient in its dtype; by default, the gradient is judged in float64.
        """
        if answer is None and not self.trusted:
            return self._judge_by_differences(got.cpu())
        answer = answer or self.answer
        expected = answer.tensor
        known = torch.where(expected.isfinite(), got.cpu(), expected.to(got.dtype))
        verdict = judge(known, answer)
        if verdict.wrong:
            between = self.numerical.kinks & known.isfinite()
            if bool(between.any()):
                between &= ~self.numerical.wrong(torch.where(between, known.to(expected.dtype), expected))
                verdict = judge(torch.where(between, expected.to(got.dtype), known), answer)
        return verdict.difference

    def _judge_by_differences(self, got: Tensor) -> Difference | None:
        """Judge by differences: with an infinite result, as of `x / 0`, autograd may also return nan."""
        if not got.isfinite().all() and self.among.recorded and not self.among.has_finite_results:
            open_ = got.isnan() & self.through_reference.isnan()
            got = torch.where(open_, self.numerical.values.nan_to_num().to(got), got)
        return self.numerical.judge(got)


def _size_of_gradient(subject: Subject, sample: Sample, argnum: int) -> float:
    grads = plain_grad_outputs(subject, sample).in_double()
    plain = in_all_digits(subject, subject.plain(sample))
    line = DirectionalFunction(plain, sample.in_double(), argnum, grads)
    (gradient,) = vjp_or_zeros(plain, sample.in_double(), (argnum,), grads)
    return max(largest_magnitude(gradient), float(line.weighed.abs().sum()) / line.usual)


def by_differences(
    subject: Subject, sample: Sample, flat: Sequence[Any], argnums: Sequence[int], grads: Grads
) -> list[Tensor | None]:
    """Gradients by finite differences, if no other right gradient is known; nan for unknown elements."""
    return [numerical(subject, sample, flat, argnum, grads).known for argnum in argnums]


def numerical(
    subject: Subject,
    sample: Sample,
    flat: Sequence[Any],
    argnum: int,
    grads: Grads,
    elements: int | None = None,
) -> NumericalGradient:
    """The gradient by one input by finite differences, in float64."""
    plain = in_all_digits(subject, subject.plain(sample))
    most = elements or subject.effort.moved(sample.elements)
    return numerical_gradient(plain, flat, argnum, grads, elements=most, generator=subject.generator())


THOUSANDTH = 1e-3
"""Maximum error of an approximation, such as another formula's derivative, as a share of the largest
element."""


def approximate(failure: Failure, off: float, of: str = "its largest element") -> Failure:
    """The failure, which is minor if the error is at most a thousandth of the gradient's largest element.

    Args:
        off: The largest error.
        of: The quantity of which the error is a share.
    """
    if off > THOUSANDTH:
        return failure
    if failure.cause not in (UNKNOWN, "region"):
        return replace(failure, minor=True)
    words = f"its error is at most {off:.1g} of {of}. If you intend this error, `accept` it"
    return replace(failure, cause="approximate", message=f"{failure.message}; {words}", minor=True)


def approximate_by_differences(
    failure: Failure, run: Run, argnum: int, values: Sequence[Any], off: float, right: Tensor
) -> Failure:
    """The failure, which is also minor if the error is below half of the digits of the results.

    A solver with a tolerance keeps a smaller part of its starting point, which only differences show.

    Args:
        failure: The failure.
        run: The call.
        argnum: The input.
        values: Arguments in float64, followed by the grad_outputs.
        off: The largest error, as a share of the largest element.
        right: Finite differences.
    """
    count = len(run.sample.flat)
    line = DirectionalFunction(run.subject.plain(run.sample), values[:count], argnum, values[count:])
    size = float(line.weighed.abs().sum()) / line.usual
    share = off * largest_magnitude(right) / size if size and math.isfinite(off) else math.inf
    if off <= THOUSANDTH or share > half_of_digits(torch.float64):
        return approximate(failure, off)
    return approximate(failure, share, "the ratio of the results to the input")


def share_off(got: Tensor, right: Tensor) -> float:
    """Return the largest error of a gradient as a share of the largest element of the right gradient.

    Example:
        >>> share_off(torch.tensor([1.0, 4.5]), torch.tensor([1.0, 5.0]))
        0.1
    """
    known = right.isfinite()
    off, largest = (got.detach().to(right) - right)[known], largest_magnitude(right)
    if not off.any():
        return 0.0
    return float(off.abs().max()) / largest if largest and bool(off.isfinite().all()) else math.inf


APART = 1e-2
"""Relative move that breaks the relation between tied inputs."""

SAME = 1e-6
"""Maximum error of a right gradient, as a share of its largest element; squared if the gradient is zero."""


def where_tied(finding: Failure, subject: Subject, moved: str | None = None) -> Failure:
    """A failure about numbers, in strained circumstances if it only occurs when tied inputs are separated.

    It concerns the gradient by a tied input, or is seen on inputs whose relation is broken.

    Args:
        moved: Label of the input that was changed; by default, the inputs that differ from the author's
            sample.
    """
    sample = shown_sample(finding, subject.samples)
    if not CAUSES[finding.cause].numeric or sample is None:
        return finding
    concerned = {finding.input, moved}
    if moved is None and sample.change is not None:
        pairs = zip(sample.labels, sample.flat, sample.change.of.flat, strict=True)
        concerned |= {label for label, now, then in pairs if is_inexact(now) and not are_same([now], [then])}
    tied = tied_inputs(subject) if concerned != {None} else frozenset()
    if not concerned & tied:
        return finding
    names = " and ".join(f"`{label}`" for label in sorted(tied))
    words = f"{names} depend on each other in your samples: if only one of them changes, gradients are wrong"
    return replace(finding, given="strained", message=f"{finding.message}; {words}")


def where_set(finding: Failure, subject: Subject, moved: str | None = None) -> Failure:
    """A failure about a gradient, in strained circumstances if only a setting of the backward causes it.

    A setting is an argument on which no result depends, such as a constant that damps the gradient.

    Args:
        moved: Label of the input that was changed; by default, a number that differs from the author's
            sample.
    """
    sample = shown_sample(finding, subject.samples)
    if sample is None or not CAUSES[finding.cause].numeric or finding.input not in sample.labels:
        return finding
    found = [moved] if moved is not None else _other_numbers(sample)
    if len(found) != 1 or finding.input in found or not _is_setting(subject, sample, found[0]):
        return finding
    words = (
        f"no result depends on `{found[0]}`, which may be a setting of the backward: leave it if you "
        "intend this"
    )
    return replace(finding, given="strained", message=f"{finding.message}; {words}")


def _other_numbers(sample: Sample) -> list[str]:
    """Labels of the numbers that a derived sample has changed, if it has the same tensors."""
    if sample.change is None:
        return []
    pairs = zip(sample.labels, sample.flat, sample.change.of.flat, strict=True)
    changed = [(label, now) for label, now, then in pairs if now is not then]
    return [label for label, _ in changed] if all(is_number(now) for _, now in changed) else []


def _is_setting(subject: Subject, sample: Sample, label: str) -> bool:
    """Return True if each result keeps each bit when an argument changes."""
    argnum, given = sample.labels.index(label), sample.in_double()
    own = given[argnum]
    others = [sample.change.of.flat[argnum]] if sample.change is not None else []
    if isinstance(own, Tensor):
        others = [torch.full_like(own, number) for number in (0.0, 1.0, -1.0)]
    with torch.no_grad(), Overlooking():
        results = [
            [each.clone() for each in subject.call(sample, [*given[:argnum], value, *given[argnum + 1 :]])]
            for value in (own, *others)
        ]
        return all(
            same_bits(one, other) for each in results for one, other in zip(each, results[0], strict=True)
        )
    return False


def tied_inputs(subject: Subject) -> frozenset[str]:
    """Labels of tied inputs: if one of them is moved alone, a gradient that was right becomes wrong.

    A single input cannot be tied: a gradient that is right only if `w` sums to one is wrong.
    """
    sample = next((each for each in subject.samples if not each.origin), None)
    if sample is None:
        return frozenset()
    return subject.once("tied inputs", sample, partial(_tied, subject, sample))


def _tied(subject: Subject, sample: Sample) -> frozenset[str]:
    right = {*sample.labels} - _wrong(subject, sample)
    generator = subject.generator()
    apart: set[str] = set()
    for argnum in sample.inexact:
        value = sample.flat[argnum]
        if value.numel() < 2 or bool((value == value.flatten()[0]).all()):
            continue  # a constant proves no relation
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        moved = (value * (1 + APART * noise.to(value.device))).to(value.dtype)
        if _wrong(subject, replace(sample, flat=sample.with_value(argnum, moved), copies={})) & right:
            apart.add(sample.labels[argnum])
    return frozenset(apart) if len(apart) > 1 else frozenset()


def _wrong(subject: Subject, sample: Sample) -> set[str]:
    """Labels of the inputs whose gradient is wrong for a sample, or cannot be compared."""
    with Overlooking():
        rights, grads = RightGradients(subject, sample), plain_grad_outputs(subject, sample)
        found = Backward(rights)(grads.beside(sample)(torch.float64, CPU))
        rated = [rights.one(at, grads) for at in rights.argnums]
        every = [each.answer.value if each.trusted else each.numerical.values for each in rated]
        present = [each.nan_to_num(0.0, 0.0, 0.0) for each in every if each is not None]
        floor = SAME**2 * max(map(largest_magnitude, present), default=0.0)
        return {
            sample.labels[at]
            for at, got, right in zip(rights.argnums, found, every, strict=True)
            if right is not None and not agree(got, right, floor)
        }
    return {*sample.labels}


def agree(got: Tensor, right: Tensor, floor: float = 0.0) -> bool:
    """Return True if every finite element agrees: a difference within a large bound proves no tie."""
    known = right.isfinite()
    numbers = right.masked_fill(~known, 0.0)
    bound = floor + SAME * largest_magnitude(numbers)
    return bool((is_close(got.to(right), numbers, bound) | ~known).all())
