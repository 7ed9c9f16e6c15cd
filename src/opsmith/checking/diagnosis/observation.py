"""Observations: a wrong tensor beside the right one, and functions that compute both on other inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.diagnosis.gradient_paths import GradientPaths
from opsmith.checking.exceptions import Overlooking
from opsmith.checking.numerics.autodiff import vjp
from opsmith.checking.numerics.compare import largest_magnitude
from opsmith.checking.samples.batches import all_finite
from opsmith.checking.samples.domain import restored
from opsmith.checking.samples.perturb import METHODS, draw_fresh
from opsmith.checking.samples.sample import Sample, is_inexact, replica
from opsmith.checking.samples.variations import form_of, variations
from opsmith.checking.subject import Subject
from opsmith.core.generate_like import WHOLE

Grads = Sequence[Tensor | None]
"""grad_output of each result; None where there is none."""

MORE = 8
"""Number of further fresh inputs that narrow down a condition."""


@dataclass(frozen=True)
class Observation:
    """A computed tensor, the right one, and functions that compute both on other inputs.

    Only the first two fields are needed; the others allow more hypotheses to be tested.

    Args:
        got: Computed tensor; None where there is none.
        expected: Right tensor, in float64 or complex128, of the same shape unless the shape is the fault.
        argument: Label of the input whose gradient it is; None for a result or a tangent.
        inputs: Flat inputs, by label.
        grads: grad_output of each visible result, by its name.
        results: Visible results, by name, in float64.
        other_gradients: Returns the gradients of the other inputs, each as the computed one and the right
            one.
        backward: Computes the gradient for other grad_outputs, on the same inputs.
        expected_for: Computes the right gradient for other grad_outputs, on the same inputs.
        expected_at: Computes the right gradient for the same grad_outputs, with some inputs changed.
        paths: Returns the paths through the reference that the right gradient is a sum over.
        perturb: Returns the observation with every number moved by a relative step, for a seed.
        tolerance: Allowed error of each element.
        redraw: Returns the observation on fresh inputs of the same shapes with fresh grad_outputs, for a
            seed, and for 0 with integers of another sample; None where nothing can be drawn again.
        at_other_sizes: Returns functions of a seed, each for the observation at another size.
        fresh_count: Number of fresh inputs on which a hypothesis must hold.
        more_count: Number of further ones that may be drawn to narrow down a condition.
    """

    got: Tensor | None
    expected: Tensor
    argument: str | None = None
    inputs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    grads: Mapping[str, Tensor | None] = field(default_factory=lambda: MappingProxyType({}))
    results: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))
    other_gradients: Callable[[], Mapping[str, tuple[Tensor | None, Tensor]]] | None = None
    backward: Callable[[Grads], Tensor | None] | None = None
    expected_for: Callable[[Grads], Tensor] | None = None
    expected_at: Callable[[Mapping[str, Any]], Tensor | None] | None = None
    paths: Callable[[], GradientPaths | None] | None = None
    perturb: Callable[[float, int], Observation | None] | None = None
    tolerance: Tensor | None = None
    redraw: Callable[[int], Observation | None] | None = None
    at_other_sizes: Callable[[], Sequence[Callable[[int], Observation | None]]] | None = None
    fresh_count: int = 3
    more_count: int = MORE

    def grads_of_element(self, name: str, at: int, value: float) -> Grads:
        """Return grad_outputs of zeros, but for one element of one result."""
        zeros = partial(torch.zeros_like, memory_format=torch.contiguous_format)
        grads = {each: None if grad is None else zeros(grad) for each, grad in self.grads.items()}
        alone = grads[name]
        assert alone is not None
        alone.view(-1)[at] = value
        return list(grads.values())


ExpectedGradients = Callable[[Sample, Sequence[Any], Sequence[int], Grads], list[Tensor | None] | None]
"""Right gradients of some arguments, for flat arguments in float64 and grad_outputs."""

RunResults = Callable[[Sample, Sequence[Any]], Sequence[Tensor | None]]
"""Visible results for flat arguments."""

APART = 0x9E3779B9
"""Offset of the seeds of fresh draws from those of a check."""

KINK = 1e-7
"""Distance to both sides of an input at which its gradient is tested for a jump."""

NUMERICAL = 1e-6
"""Error of finite differences, relative to their largest element."""


@dataclass(frozen=True)
class Observer:
    """Observes the gradient of one input, or one result, on a sample and on fresh inputs.

    Args:
        subject: The checked operator.
        sample: Sample with a wrong tensor.
        argnum: Position of the input whose gradient is wrong, or of the visible result that is.
        subset: Positions of the inputs that were differentiated together; empty for a result.
        right: Computes the right gradients: by autograd through the reference by default.
        run: Computes the visible results that are wrong: those of the operator by default.
        dtype: dtype of floating inputs.
        device: Device of the inputs.
    """

    subject: Subject
    sample: Sample
    argnum: int
    subset: tuple[int, ...] = ()
    right: ExpectedGradients | None = None
    run: RunResults | None = None
    dtype: torch.dtype = torch.float64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def observe(self, flat: Sequence[Any], grads: Grads) -> Observation:
        """Observe the tensor on these arguments, with these grad_outputs (both in float64).

        Args:
            flat: Flat arguments.
            grads: grad_output of each visible result; nothing for a result.
        """
        return replace(
            self._seen(flat, grads),
            redraw=lambda seed: self.draw(flat, grads, seed),
            at_other_sizes=lambda: [partial(self._at, sample, grads) for sample in self._others()],
            fresh_count=self.subject.effort.fresh,
            more_count=0 if self.right else MORE,
        )

    def _seen(self, flat: Sequence[Any], grads: Grads) -> Observation:
        if not self.subset:
            return self._result(flat)
        return self._without_kinks(self._gradient(flat, grads), flat, grads)

    def _others(self) -> list[Sample]:
        """Collect samples of other sizes: the author's, and derived ones."""
        derived = variations(self.subject).samples
        others: dict[str, Sample] = {}
        for sample in (*self.subject.samples, *derived):
            if self._elsewhere(sample):
                others.setdefault(str(_shapes(sample.flat)), sample)
        return list(others.values())

    def _elsewhere(self, sample: Sample) -> bool:
        """Return True if another sample has the same arguments at other sizes."""
        shapes, own = _shapes(sample.flat), _shapes(self.sample.flat)
        empty = any(shape is not None and 0 in shape for shape in shapes)
        if empty or shapes == own or sample.labels != self.sample.labels:
            return False
        return [each is None for each in shapes] == [each is None for each in own]

    def _at(self, sample: Sample, grads: Grads, seed: int) -> Observation | None:
        """Observe another sample."""
        observer = replace(self, sample=sample)
        return observer.draw(sample.in_double(), grads, seed)

    def _least_repeating(self) -> Sample:
        """Return the sample whose integers repeat least, where the others are like those of the wrong one.

        Fresh indices are like the given ones: where these are all the same, a gradient that is wrong where
        an index repeats looks like a shifted one.
        """
        samples = (*self.subject.samples, *variations(self.subject).samples) if _distinct(self.sample) else ()
        alike = [each for each in samples if form_of(each) == form_of(self.sample)]
        return max((self.sample, *alike), key=_distinct)

    def draw(self, flat: Sequence[Any], grads: Grads, seed: int) -> Observation | None:
        """Observe on fresh inputs, drawn closer to the sample's where the operator rejects them.

        The seed 0 takes the integers that repeat least, if the sample's own repeat more.
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
                results = self.subject.plain(self.sample)([replica(value) for value in values])
                if not all_finite(results):
                    continue
                fresh = [
                    None if grad is None else _like(result, generator)
                    for grad, result in zip(grads, results, strict=True)
                ]
                observation = self._seen(values, fresh)
                if self.right is not None or all_finite([observation.expected]):
                    return observation
        return None

    def _without_kinks(self, observation: Observation, flat: Sequence[Any], grads: Grads) -> Observation:
        """Exclude the elements at a kink, at which either side is right."""
        if (
            self.right is not None
            or observation.got is None
            or observation.got.shape != observation.expected.shape
        ):
            return observation  # finite differences mark unknown elements themselves
        jumps = self._across(flat, grads, KINK)
        size = float(observation.expected.abs().max()) if observation.expected.numel() else 0.0
        kinks = (jumps > 1e-3 * size) & observation.got.cpu().isfinite()
        if not bool(kinks.any()):
            return observation
        # A gradient that nearly vanishes, as at an optimum, changes much relative to its size; it is a jump
        # only if the difference does not shrink with the step.
        kinks &= self._across(flat, grads, KINK / 8) > jumps / 2
        if not bool(kinks.any()):
            return observation
        # Zeros are neutral for every hypothesis, such as a sign or a factor.
        got, expected = (
            torch.where(kinks, 0, each) for each in (observation.got.cpu(), observation.expected)
        )
        return replace(observation, got=got, expected=expected)

    def _across(self, flat: Sequence[Any], grads: Grads, step: float) -> Tensor:
        """Compute the difference of the right gradient between both sides of these arguments."""
        sides = []
        for side in (step, -step):
            generator = torch.Generator().manual_seed(APART)
            moved = [_moved(value, side, generator, least=1.0) for value in flat]
            sides.append(self._right(moved, (self.argnum,), grads)[0])
        return (sides[0] - sides[1]).abs()

    def _gradient(self, flat: Sequence[Any], grads: Grads) -> Observation:
        label = self.sample.labels[self.argnum]
        backward = partial(self._backward, flat)
        right = partial(self._right, flat)
        answers = dict(zip(self.subset, backward(self.subset, grads), strict=True))
        (expected,) = right((self.argnum,), grads)
        with torch.no_grad():
            results = self.subject.plain(self.sample)([replica(value) for value in flat])
        names = [result.name for result in self.subject.results(self.sample)]

        @cache
        def others() -> dict[str, tuple[Tensor | None, Tensor]]:
            every = tuple(argnum for argnum in self.sample.inexact if argnum != self.argnum)
            rights = right(every, grads) if every else []
            found: dict[str, tuple[Tensor | None, Tensor]] = {}
            for argnum, expected in zip(every, rights, strict=True):
                got = answers.get(argnum)
                if argnum not in answers:
                    with Overlooking():  # reported by a failure of its own
                        (got,) = backward((argnum,), grads)
                found[self.sample.labels[argnum]] = (got, expected)
            return found

        return Observation(
            answers[self.argnum],
            expected,
            argument=label,
            inputs=dict(zip(self.sample.labels, flat, strict=True)),
            grads=dict(zip(names, grads, strict=True)),
            results={name: r.detach() for name, r in zip(names, results, strict=True)},
            other_gradients=others,
            backward=lambda grad_outputs: backward(self.subset, grad_outputs)[self.subset.index(self.argnum)],
            # Finite differences take a run for each element of the input, too many to repeat.
            expected_for=None if self.right else lambda grad_outputs: right((self.argnum,), grad_outputs)[0],
            expected_at=None if self.right else partial(self._right_at, flat, grads),
            paths=lambda: self._paths(flat, grads),
            perturb=partial(self._near, flat, grads),
            tolerance=None
            if self.right is None
            else torch.full(expected.shape, NUMERICAL * largest_magnitude(expected)),
        )

    def _paths(self, flat: Sequence[Any], grads: Grads) -> GradientPaths | None:
        """Return the paths through the reference; None where the right gradient is not a sum over them."""
        if self.right is not None:
            return None
        return GradientPaths(self.subject.plain(self.sample), flat, self.argnum, grads)

    def _right_at(self, flat: Sequence[Any], grads: Grads, changed: Mapping[str, Any]) -> Tensor | None:
        """Compute the right gradient with some inputs changed; None where the reference rejects them."""
        pairs = zip(self.sample.labels, flat, strict=True)
        values = [changed.get(label, value) for label, value in pairs]
        with Overlooking():  # changed inputs need not be valid
            return self._right(values, (self.argnum,), grads)[0]
        return None

    def _near(self, flat: Sequence[Any], grads: Grads, step: float, seed: int) -> Observation | None:
        generator = torch.Generator().manual_seed(seed)
        values, fresh = ([_moved(each, step, generator) for each in some] for some in (flat, grads))
        with Overlooking():  # the perturbed input may be outside of the domain
            return self._gradient(values, fresh) if self.subset else self._result(values)
        return None

    def _backward(self, flat: Sequence[Any], argnums: Sequence[int], grads: Grads) -> list[Tensor | None]:
        """Compute the operator's gradients."""
        own = [replica(value, self.dtype, self.device) for value in flat]
        grad_outputs = [replica(grad, self.dtype, self.device) for grad in grads]
        return vjp(partial(self.subject.call, self.sample), own, argnums, grad_outputs)

    def _right(self, flat: Sequence[Any], argnums: Sequence[int], grads: Grads) -> list[Tensor]:
        """Compute the right gradients; zeros where autograd has none."""
        values = [replica(value) for value in flat]
        if self.right is None:
            found = vjp(self.subject.plain(self.sample), values, argnums, grads)
        else:
            found = self.right(self.sample, values, argnums, grads) or [None] * len(argnums)
        return [
            torch.zeros_like(flat[argnum]) if gradient is None else gradient
            for argnum, gradient in zip(argnums, found, strict=True)
        ]

    def _result(self, flat: Sequence[Any]) -> Observation:
        run = self.run or self.subject.call
        got = run(self.sample, [replica(value, self.dtype, self.device) for value in flat])
        right = self.subject.plain(self.sample)([replica(value) for value in flat])
        return Observation(
            got[self.argnum],
            right[self.argnum],
            inputs=dict(zip(self.sample.labels, flat, strict=True)),
            perturb=partial(self._near, flat, ()),
        )


def _distinct(sample: Sample) -> int:
    """Count the distinct numbers in tensors of integers."""
    tensors = (value for value in sample.flat if isinstance(value, Tensor) and value.dtype in WHOLE)
    return sum(len(each.unique()) for each in tensors)


def _like(result: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.randn(result.shape, generator=generator, dtype=torch.float64)
    if result.is_complex():
        return torch.complex(drawn, torch.randn(result.shape, generator=generator, dtype=torch.float64))
    return drawn


def _moved(value: Any, step: float, generator: torch.Generator, *, least: float = 0.0) -> Any:
    """Move each element by a relative step, or by a step relative to the least size."""
    fresh = replica(value)
    if not is_inexact(fresh):
        return fresh
    signs = torch.randint(0, 2, fresh.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return fresh + step * signs.to(fresh.device) * fresh.abs().clamp_min(least)


def _shapes(flat: Sequence[Any]) -> list[Any]:
    return [tuple(value.shape) if isinstance(value, Tensor) else None for value in flat]
