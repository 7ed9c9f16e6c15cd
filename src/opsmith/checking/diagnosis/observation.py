"""Observations: a wrong gradient and the right gradient, on the inputs of a sample and on fresh inputs.

Hypotheses predict the wrong gradient from the right gradient, and are tested on all observations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.diagnosis.decompositions import NAMED
from opsmith.checking.diagnosis.gradient_paths import GradientPaths
from opsmith.checking.exceptions import Overlooking
from opsmith.checking.numerics.autodiff import vjp, vjp_or_zeros
from opsmith.checking.run import Run
from opsmith.checking.samples.batches import all_finite, replicas
from opsmith.checking.samples.domain import restored
from opsmith.checking.samples.grad_outputs import random_grad_output
from opsmith.checking.samples.perturb import METHODS, draw_fresh
from opsmith.checking.samples.sample import Sample
from opsmith.checking.samples.variations import form_of, variations
from opsmith.core.cached_property import cached_property
from opsmith.core.generate_like import WHOLE
from opsmith.display import short_repr
from opsmith.judging.compare import in_double, is_close, largest_magnitude, share_of_largest
from opsmith.judging.tensors import is_inexact, perturbed, replica

Grads = Sequence[Tensor | None]
"""grad_output of each result; None for a result without one."""

SAME = 1e-6
"""Maximum relative difference at which a factor, or an error that a hypothesis explains, counts as equal on
two inputs."""

MOST_ELEMENTS = 96
"""Maximum number of elements of a grad_output that are tried one by one."""

NOTHING: Mapping[str, Any] = MappingProxyType({})

ROUNDINGS = 256
"""Maximum difference between two right computations, in roundings of the largest element."""


@dataclass(frozen=True, eq=False)
class Observation:
    """A computed tensor and the right tensor.

    Only the first two fields are needed; the others allow more hypotheses to be tested.

    Args:
        computed: Computed tensor; None if there is none.
        right: Right tensor, of the same shape unless the shape is the fault.
        argument: Label of the input whose gradient it is; None for a result or a tangent.
        inputs: Flat inputs, by label.
        grads: grad_output of each visible result, by its name.
        results: Visible results, by name, in float64.
        tolerance: Allowed error of each element.
        observer: Observer that computes both tensors of a gradient again.
    """

    __repr__ = short_repr

    computed: Tensor | None
    right: Tensor
    argument: str | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)
    grads: Mapping[str, Tensor | None] = field(default_factory=dict)
    results: Mapping[str, Tensor] = field(default_factory=dict)
    tolerance: Tensor | None = None
    observer: Observer | None = None

    @cached_property
    def expected(self) -> Tensor:
        """The right tensor, on the CPU in float64 or complex128."""
        return in_double(self.right)

    @cached_property
    def got(self) -> Tensor:
        """The computed tensor, in the dtype of the right tensor; zeros if there is none."""
        if self.computed is None:
            return torch.zeros_like(self.expected)
        return in_double(self.computed).to(self.expected.dtype)

    @cached_property
    def same_shape(self) -> bool:
        """True if elements can be compared one by one."""
        return self.got.shape == self.expected.shape

    @cached_property
    def error(self) -> Tensor:
        """Error of each element; 0 where the right tensor is not finite."""
        return torch.where(self.expected.isfinite(), (self.got - self.expected).abs(), 0.0)

    @property
    def relative_error(self) -> float:
        """The largest error, as a share of the largest right element."""
        return largest_magnitude(self.error) / (largest_magnitude(self.expected) or 1.0)

    @cached_property
    def rounding(self) -> float:
        """Bound of the rounding error of the largest element."""
        dtypes = [self.expected.dtype, *([] if self.computed is None else [self.computed.dtype])]
        coarsest = max(torch.finfo(dtype).eps for dtype in dtypes)
        return share_of_largest(ROUNDINGS * coarsest, self.expected, self.got)

    @cached_property
    def slack(self) -> Tensor:
        """Maximum distance of each element from the prediction of a hypothesis."""
        share = SAME * largest_magnitude(self.error)
        least = torch.tensor(max(share, self.rounding), dtype=torch.float64)
        return least if self.tolerance is None else torch.maximum(least, self.tolerance.cpu().double())

    @cached_property
    def is_small(self) -> bool:
        """True if the difference is so small that a hypothesis about a large difference would fit as well."""
        return not bool((self.error.nan_to_num(float("inf")) > 16 * self.slack).any())

    @cached_property
    def wrong(self) -> Tensor:
        """Mask of the wrong elements, even if their error is small relative to the worst."""
        return self.error.nan_to_num(float("inf")) > self.slack

    def equals(self, candidate: Tensor | None) -> bool:
        """Return True if the computed tensor equals the predicted tensor in every element."""
        if candidate is None or candidate.shape != self.got.shape:
            return False
        return bool(self.agrees_with(candidate).all())

    def agrees_with(self, candidate: Tensor) -> Tensor:
        """Mark the elements that equal the prediction; elements that are not finite must be identical."""
        close = is_close(self.got, in_double(candidate).to(self.got.dtype), self.slack)
        return close | ~self.expected.isfinite()

    @property
    def own(self) -> Any:
        """The input whose gradient it is; None if there is none."""
        return self.inputs.get(self.argument or "")

    @property
    def given(self) -> dict[str, Tensor]:
        """The grad_outputs that are not None."""
        return {name: grad for name, grad in self.grads.items() if grad is not None}

    def of(self, name: str) -> str:
        """Name a result in a message, if there are several."""
        return f" of `{name}`" if len(self.grads) > 1 else " of the result"

    @property
    def exact(self) -> Observer | None:
        """The observer, if autograd through the reference is right; finite differences take too many runs."""
        return self.observer if self.observer is not None and self.observer.right is None else None

    def backward(self, grads: Grads) -> Tensor:
        """Compute the gradient for other grad_outputs, on the same inputs; zeros if there is none."""
        assert self.observer is not None
        found = self.observer.by_own([*self.inputs.values()], grads)
        return torch.zeros_like(self.right) if found is None else found

    def right_for(
        self, grads: Mapping[str, Any] = NOTHING, inputs: Mapping[str, Any] = NOTHING
    ) -> Tensor | None:
        """Compute the right gradient with some grad_outputs or inputs changed.

        None if the reference rejects them, or if this takes long.
        """
        with Overlooking():  # changed inputs need not be valid
            if self.exact is not None:
                flat, given = [*{**self.inputs, **inputs}.values()], [*{**self.grads, **grads}.values()]
                return in_double(self.exact.rights(flat, (self.exact.argnum,), given)[0])
        return None

    def if_changed(
        self, change: Callable[[Any], Tensor | float | None], *, grad: str = "", input: str = ""
    ) -> Tensor | None:
        """Compute the right gradient with one input changed, or one grad_output, or each grad_output.

        None if there is no such change.
        """
        if input:
            changed = {input: change(self.inputs[input])}
            return None if changed[input] is None else self.right_for(inputs=changed)
        grads = {name: change(each) for name, each in self.given.items() if grad in ("", name)}
        return None if None in grads.values() else self.right_for(grads)

    def parts(self, name: str) -> Iterator[Tensor]:
        """Compute the part of the right gradient for each element of a grad_output, in the order of memory.

        There are none if this takes long.
        """
        grad = self.grads[name]
        zeros = {each: torch.zeros_like(value) for each, value in self.given.items()}
        if grad is not None and grad.numel() <= MOST_ELEMENTS:
            for alone in grad.flatten().diag().reshape(grad.numel(), *grad.shape):
                part = self.right_for({**zeros, name: alone})
                yield from () if part is None else (part,)

    @cached_property
    def other_gradients(self) -> Mapping[str, tuple[Tensor | None, Tensor]]:
        """The computed and the right gradient of each other input, by label."""
        seen, found = self.observer, dict[str, tuple[Tensor | None, Tensor]]()
        if seen is None:
            return found
        flat, grads = [*self.inputs.values()], [*self.grads.values()]
        every = tuple(argnum for argnum in seen.sample.inexact if argnum != seen.argnum)
        answers = dict(zip(seen.argnums, seen.backward(flat, seen.argnums, grads), strict=True))
        for argnum, right in zip(every, seen.rights(flat, every, grads) if every else (), strict=True):
            if argnum not in answers:
                with Overlooking():  # a separate failure reports it
                    (answers[argnum],) = seen.backward(flat, (argnum,), grads)
            found[seen.sample.labels[argnum]] = (answers.get(argnum), right)
        return found

    @cached_property
    def paths(self) -> GradientPaths | None:
        """Paths through the reference; None if the right gradient is not a sum over them."""
        if self.exact is None:
            return None
        function = self.exact.subject.plain(self.exact.sample)
        return GradientPaths(function, [*self.inputs.values()], self.exact.argnum, [*self.grads.values()])

    def moved(self, step: float, seed: int) -> Observation | None:
        """Observe with every number moved by a relative step; None if this is outside of the domain."""
        generator = torch.Generator().manual_seed(seed)
        values, grads = (
            [perturbed(each, step, generator) for each in some.values()] for some in (self.inputs, self.grads)
        )
        with Overlooking():
            return None if self.observer is None else self.observer.gradient(values, grads)
        return None


ExpectedGradients = Callable[[Sample, Sequence[Any], Sequence[int], Grads], list[Tensor | None] | None]
"""Right gradients of some arguments, for flat arguments in float64 and grad_outputs."""

APART = 0x9E3779B9
"""Offset of the seeds of fresh draws from those of a check."""

KINK = 1e-7
"""Distance on both sides of an input at which its gradient is tested for a jump."""


@dataclass(frozen=True)
class Observer(Run):
    """A run whose gradient of one input is observed, on its sample and on fresh inputs.

    Args:
        argnum: Position of the input, among the inputs that are differentiated together.
        right: Function that computes the right gradients; autograd through the reference by default.
    """

    __repr__ = short_repr

    argnum: int = 0
    right: ExpectedGradients | None = None

    def observe(self, flat: Sequence[Any], grads: Grads) -> Observation:
        """Observe on given arguments and grad_outputs, both in float64.

        Elements at a kink are excluded, since the derivatives of both sides are right there.
        """
        observation = self.gradient(flat, grads)
        if self.right is not None or observation.computed is None or not observation.same_shape:
            return observation  # finite differences mark unknown elements themselves
        jumps = self._across(flat, grads, KINK)
        kinks = (jumps > 1e-3 * largest_magnitude(observation.right)) & observation.computed.cpu().isfinite()
        if bool(kinks.any()):
            # A gradient that nearly vanishes, as at an optimum, changes much relative to its size; this is a
            # jump only if the difference does not shrink with the step.
            kinks &= self._across(flat, grads, KINK / 8) > jumps / 2
        # Zeros are neutral for every hypothesis, such as a sign or a factor.
        both = (observation.computed.cpu(), observation.right)
        computed, right = (each.masked_fill(kinks, 0) for each in both)
        return replace(observation, computed=computed, right=right)

    def _across(self, flat: Sequence[Any], grads: Grads, step: float) -> Tensor:
        """Compute the difference between the right gradients on both sides of these arguments."""
        sides = []
        for side in (step, -step):
            generator = torch.Generator().manual_seed(APART)
            moved = [_beside(value, side, generator) for value in flat]
            sides.append(self.rights(moved, (self.argnum,), grads)[0])
        return (sides[0] - sides[1]).abs()

    def gradient(self, flat: Sequence[Any], grads: Grads) -> Observation:
        """Observe the gradient, also at a kink."""
        (right,) = self.rights(flat, (self.argnum,), grads)
        with torch.no_grad():
            results = self.subject.plain(self.sample)(replicas(flat))
        names = [result.name for result in self.subject.results(self.sample)]
        return Observation(
            self.by_own(flat, grads),
            right,
            self.sample.labels[self.argnum],
            dict(zip(self.sample.labels, flat, strict=True)),
            dict(zip(names, grads, strict=True)),
            {name: each.detach() for name, each in zip(names, results, strict=True)},
            None if self.right is None else torch.full(right.shape, SAME * largest_magnitude(right)),
            self,
        )

    def by_own(self, flat: Sequence[Any], grads: Grads) -> Tensor | None:
        """Compute the operator's gradient of the input."""
        return self.backward(flat, self.argnums, grads)[self.argnums.index(self.argnum)]

    def backward(self, flat: Sequence[Any], argnums: Sequence[int], grads: Grads) -> list[Tensor | None]:
        """Compute the operator's gradients."""
        own = [replica(value, self.dtype, self.device) for value in flat]
        grad_outputs = [replica(grad, self.dtype, self.device) for grad in grads]
        return vjp(partial(self.subject.call, self.sample), own, argnums, grad_outputs)

    def rights(self, flat: Sequence[Any], argnums: Sequence[int], grads: Grads) -> list[Tensor]:
        """Compute the right gradients; zeros where autograd returns none."""
        if self.right is None:
            return vjp_or_zeros(self.subject.plain(self.sample), replicas(flat), argnums, grads)
        found = self.right(self.sample, replicas(flat), argnums, grads) or [None] * len(argnums)
        return [
            torch.zeros_like(flat[argnum]) if gradient is None else gradient
            for argnum, gradient in zip(argnums, found, strict=True)
        ]

    def draw(self, flat: Sequence[Any], grads: Grads, seed: int) -> Observation | None:
        """Observe on fresh inputs, which are drawn closer to the sample's if the operator rejects them.

        For seed 0, the sample whose integers repeat least is used, if the sample's own repeat more.
        """
        methods: Sequence[str] = METHODS if seed % 2 else ("mixed", "like", "scaled")
        if seed == 0:
            least = self._least_repeating()
            if least is self.sample:
                return None
            flat, methods = least.in_double(), ("scaled",)  # which keeps integers
        for method in methods:
            generator = torch.Generator().manual_seed(APART + self.subject.seed * 1000 + seed)
            values = restored(self.subject, self.sample, draw_fresh(flat, generator, method))
            with Overlooking():  # rejected inputs are drawn again by the next method
                results = self.subject.plain(self.sample)(replicas(values))
                if not all_finite(results):
                    continue
                fresh = [
                    None if grad is None else random_grad_output(result, generator)
                    for grad, result in zip(grads, results, strict=True)
                ]
                observation = self.observe(values, fresh)
                if self.right is not None or all_finite([observation.right]):
                    return observation
        return None

    def _least_repeating(self) -> Sample:
        """Return the sample whose integers repeat least and whose other arguments match the wrong sample's.

        Fresh indices resemble the given indices: if these are all equal, a gradient that is wrong for
        repeated indices looks like a shifted gradient.
        """
        alike = [each for each in self._samples() if form_of(each) == form_of(self.sample)]
        return max((self.sample, *alike), key=_distinct) if _distinct(self.sample) else self.sample

    def elsewhere(self) -> list[Observer]:
        """Return observers of arguments of the same ranks at other sizes; the author's samples come first."""
        others: dict[str, Sample] = {}
        for sample in self._samples():
            shapes = [_shape(value) for value in sample.flat]
            pairs = [(_shape(own), shape) for own, shape in zip(self.sample.flat, shapes, strict=False)]
            alike = sample.labels == self.sample.labels and all(len(own) == len(each) for own, each in pairs)
            if alike and any(own != each for own, each in pairs) and not any(0 in each for each in shapes):
                others.setdefault(str(shapes), sample)
        return [replace(self, sample=sample) for sample in others.values()]

    def _samples(self) -> tuple[Sample, ...]:
        return (*self.subject.samples, *variations(self.subject).samples)


def _distinct(sample: Sample) -> int:
    """Count the distinct numbers in tensors of integers."""
    tensors = (value for value in sample.flat if isinstance(value, Tensor) and value.dtype in WHOLE)
    return sum(len(each.unique()) for each in tensors)


def _beside(value: Any, step: float, generator: torch.Generator) -> Any:
    """Move each element by a step relative to its size or to 1."""
    if not is_inexact(value):
        return replica(value)
    signs = torch.randint(0, 2, value.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return value + step * signs.to(value.device) * value.abs().clamp_min(1.0)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()


Source = tuple[str, str]
"""Name of the values in a message, and their alignment with the elements."""

OF_ENTRIES = ("times", "times first")
"""Alignments that count the entries of a tensor, not the indices of a dimension."""


def values_beside(pair: Observation) -> dict[Source, Tensor]:
    """Return tensors that align with each element of a pair, by name; the input itself comes first.

    A tensor of fewer dimensions aligns with the last dimensions, as in broadcasting, or with the first. An
    integer tensor that may contain indices yields the number of occurrences of each index, and of its own
    values. A number aligns with every element.
    """
    shape, found = pair.expected.shape, dict[Source, Tensor]()
    own_first = sorted(pair.inputs, key=lambda label: label != pair.argument)
    named = {
        f"`{label}`": pair.inputs[label] for label in own_first if isinstance(pair.inputs[label], Tensor)
    }
    named |= {f"the result `{label}`": value for label, value in pair.results.items()}
    alone = len(pair.grads) == 1
    named |= {f"the grad_output{'' if alone else f' of `{name}`'}": grad for name, grad in pair.given.items()}
    for name, value in named.items():
        for how, aligned in _aligned(value.detach().cpu(), shape):
            found[name, how] = aligned
        if value.dtype in WHOLE and value.numel():
            for how, times in _times(value.cpu(), shape):
                found[f"an index in {name}", how] = times
            for how, times in _aligned(_own_times(value.cpu()), shape):
                found[f"its value in {name}", OF_ENTRIES[how == "first"]] = times
    for label, value in pair.inputs.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[f"`{label}`", "number"] = torch.full(shape, float(value), dtype=torch.float64)
    return found


def _aligned(value: Tensor, shape: torch.Size) -> Iterator[tuple[str, Tensor]]:
    plain = value if value.dtype == torch.bool else in_double(value)
    if value.dim() <= len(shape):
        with suppress(RuntimeError):  # it does not broadcast
            yield "", plain.expand(shape)
    if 0 < value.dim() < len(shape) and value.shape == shape[: value.dim()]:
        yield "first", plain.reshape(*value.shape, *[1] * (len(shape) - value.dim())).expand(shape)


def _times(value: Tensor, shape: torch.Size) -> Iterator[tuple[str, Tensor]]:
    """Count the occurrences of each index of a dimension in a tensor of indices, or in each of its rows."""
    for dim, size in enumerate(shape):
        if int(value.min()) < -size or int(value.max()) >= size:
            continue
        index = value.long() % size
        counts = torch.bincount(index.flatten(), minlength=size).to(torch.float64)
        yield f"times along {dim}", along(counts, dim, len(shape)).expand(shape)
        if 1 < value.dim() == len(shape) and shape == (*value.shape[:dim], size, *value.shape[dim + 1 :]):
            ones = torch.ones(value.shape, dtype=torch.float64)
            yield f"times within {dim}", torch.zeros(shape, dtype=torch.float64).scatter_add(dim, index, ones)


def _own_times(values: Tensor) -> Tensor:
    """Count the occurrences of each value."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    times: Tensor = counts[inverse]
    return times


Prediction = Callable[[Observation], Tensor | None]
"""Function that predicts the computed tensor if a hypothesis is true; None if it predicts nothing."""


@dataclass(frozen=True)
class Detection:
    """A hypothesis: a cause and its prediction.

    Args:
        cause: One of `opsmith.checking.causes`.
        reason: Sentence that states the hypothesis, without a capital letter or a full stop.
        evidence: Measured values.
        weak: True if any other confirmed cause describes the fault better.
        predicted: The prediction to confirm; None if the cause has been proved in a different way.
    """

    cause: str
    reason: str
    evidence: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    weak: bool = False
    predicted: Prediction | None = field(default=None, compare=False, repr=False)


MORE = 8
"""Number of additional fresh inputs that narrow down a condition, and number of other sizes."""

FEW = 3
"""Minimum count of numbers: fewer are multiples of each other, and their positions may fit by chance."""


@dataclass(frozen=True)
class Evidence:
    """Observations on which hypotheses are tested.

    Args:
        first: The wrong observation, from which hypotheses are made.
    """

    first: Observation

    @cached_property
    def fresh(self) -> tuple[Observation, ...]:
        """Observations of the same shapes, on fresh inputs; empty if nothing can be drawn again."""
        return self._drawn(0, self.fresh_count + 1)

    @property
    def fresh_count(self) -> int:
        """Number of fresh inputs on which a hypothesis must be true; one more for different integers."""
        return 0 if self.first.observer is None else self.first.observer.subject.effort.fresh

    @cached_property
    def more(self) -> tuple[Observation, ...]:
        """Additional observations, used if the first fit several conditions."""
        return self._drawn(self.fresh_count + 1, MORE) if self.first.exact is not None else ()

    def _drawn(self, first: int, count: int) -> tuple[Observation, ...]:
        """Draw observations with some seeds; empty if nothing can be drawn again."""
        observer = self.first.observer
        if observer is None:
            return ()
        flat, grads = [*self.first.inputs.values()], [*self.first.grads.values()]
        drawn = (observer.draw(flat, grads, seed) for seed in range(first, first + count))
        return tuple(each for each in drawn if each is not None)

    @cached_property
    def other_sizes(self) -> tuple[Observation, ...]:
        """Observations at other sizes whose elements can be compared."""
        observer, grads = self.first.observer, [*self.first.grads.values()]
        others = [] if observer is None else observer.elsewhere()[:MORE]
        drawn = [each.draw(each.sample.in_double(), grads, seed) for seed, each in enumerate(others, start=1)]
        return tuple(each for each in drawn if each is not None and each.same_shape)

    @property
    def pairs(self) -> tuple[Observation, ...]:
        """The first observation and the fresh observations."""
        return (self.first, *self.fresh)

    def everywhere(self, holds: Callable[[Observation], bool]) -> bool:
        """Return True if a statement is true for the first and for every fresh observation."""
        return holds(self.first) and all(holds(pair) for pair in self.fresh)

    def fits(self, predicted: Prediction) -> bool:
        """Return True if the computed tensor equals the predicted tensor in every observation."""
        return self.everywhere(lambda pair: pair.equals(predicted(pair)))

    def first_fitting(self, hypotheses: Iterable[Detection]) -> Detection | None:
        """Return the first hypothesis without a prediction, or with one that every observation confirms."""
        fitting = (each for each in hypotheses if each.predicted is None or self.fits(each.predicted))
        return next(fitting, None)


def multiple(right: Tensor, actual: Tensor) -> complex | None:
    """Fit the factor by which one tensor is a multiple of another; None if the right tensor is zero."""
    weight = float((right.abs() ** 2).sum())
    if not weight:
        return None
    factor = complex((right.conj() * actual).sum() / weight)
    real = not right.is_complex() or abs(factor.imag) <= NAMED * abs(factor)
    return complex(factor.real) if real else factor


def times(factor: complex, tensor: Tensor) -> Tensor:
    """Multiply a tensor by a factor, which is taken as real if it has no imaginary part."""
    return tensor * (factor if factor.imag else factor.real)


def along(values: Tensor, dim: int, dims: int) -> Tensor:
    """Reshape a row of values to lie along one of several dimensions."""
    return values.reshape(-1, *[1] * (dims - dim - 1))


COMPARISONS: Mapping[Callable[[Tensor, Tensor], Tensor], tuple[str, str, str]] = MappingProxyType(
    {
        torch.eq: ("is", "the same as", "on the diagonal"),
        torch.lt: ("is less than", "less than", "above the diagonal"),
        torch.gt: ("is greater than", "greater than", "below the diagonal"),
        torch.le: ("is at most", "at most", "on and above the diagonal"),
        torch.ge: ("is at least", "at least", "on and below the diagonal"),
        torch.ne: ("is not", "different from", "off the diagonal"),
    }
)
"""Texts for each comparison of values, of indices, and of the row and column of an element."""
