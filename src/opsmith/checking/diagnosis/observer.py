"""Observations of an operator's gradients and results, which can be made anew on fresh inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.diagnosis.detectors.paths import Paths
from opsmith.checking.diagnosis.fresh_inputs import WAYS, redrawn
from opsmith.checking.diagnosis.observation import MORE, Grads, Observation
from opsmith.checking.exceptions import refuse_own
from opsmith.checking.numerics.autodiff import vjp
from opsmith.checking.numerics.compare import peak
from opsmith.checking.samples.sample import Sample, is_inexact, replica
from opsmith.checking.samples.variations import variations
from opsmith.checking.subject import Subject

Right = Callable[[Sample, Sequence[Any], Sequence[int], Grads], list[Tensor | None] | None]
"""Right gradients by the arguments at some places, for flat arguments in float64 and incoming gradients."""

Run = Callable[[Sample, Sequence[Any]], Sequence[Tensor | None]]
"""Visible results for flat arguments."""

APART = 0x9E3779B9
"""Keeps the fresh draws apart from those that a check makes from the same seed."""

KINK = 1e-7
"""How far to both sides of an input to look whether its gradient jumps there."""

NUMERICAL = 1e-6
"""How far finite differences may be off, of their largest element."""


@dataclass(frozen=True)
class Observer:
    """Makes observations of one input's gradient, or of one result, on a sample and on fresh ones.

    Args:
        subject: What is under check.
        sample: The sample on which something was wrong.
        place: Place of the input whose gradient is wrong, or of the visible result that is.
        subset: Places of the inputs that were differentiated by together; none for a result.
        right: Gives the right gradients: those of autograd through the reference by default.
        run: Gives the visible results that are wrong: those of the operator by default.
        dtype: dtype of floating inputs.
        device: Where they lie.
    """

    subject: Subject
    sample: Sample
    place: int
    subset: tuple[int, ...] = ()
    right: Right | None = None
    run: Run | None = None
    dtype: torch.dtype = torch.float64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def observe(self, flat: Sequence[Any], grads: Grads) -> Observation:
        """What is wrong on these arguments, with these incoming gradients (both in float64).

        Args:
            flat: Flat arguments.
            grads: What comes in for each visible result; nothing for a result.
        """
        seen = self._gradient(flat, grads) if self.subset else self._result(flat)
        if self.subset:
            seen = self._without_kinks(seen, flat, grads)
        return replace(
            seen,
            again=lambda seed: self.draw(flat, grads, seed),
            elsewhere=lambda: [partial(self._at, sample, grads) for sample in self._others()],
            fresh=self.subject.effort.fresh,
            more=0 if self.right else MORE,
        )

    def _others(self) -> list[Sample]:
        """Samples of other sizes: the author's, and what can be derived from them."""
        derived = variations(self.subject).samples
        others: dict[str, Sample] = {}
        for sample in (*self.subject.samples, *derived):
            if self._elsewhere(sample):
                others.setdefault(str(_shapes(sample.flat)), sample)
        return list(others.values())

    def _elsewhere(self, sample: Sample) -> bool:
        """Whether another sample has an input of the same name at the same place, of other sizes."""
        empty = any(isinstance(value, Tensor) and not value.numel() for value in sample.flat)
        if empty or sample is self.sample or sample.labels != self.sample.labels:
            return False
        alike = all(
            isinstance(mine, Tensor) == isinstance(theirs, Tensor)
            for mine, theirs in zip(self.sample.flat, sample.flat, strict=True)
        )
        return alike and _shapes(sample.flat) != _shapes(self.sample.flat)

    def _at(self, sample: Sample, grads: Grads, seed: int) -> Observation | None:
        there = replace(self, sample=sample)
        return there.draw(sample.at(torch.float64), grads, seed)

    def draw(self, flat: Sequence[Any], grads: Grads, seed: int) -> Observation | None:
        """The same on fresh inputs, drawn more gently where the operator does not take them."""
        for way in WAYS if seed % 2 else ("mixed", "like", "scaled"):
            generator = torch.Generator().manual_seed(APART + self.subject.seed * 1000 + seed)
            values = redrawn(flat, generator, way)
            try:
                results = self.subject.plain(self.sample)([replica(value) for value in values])
                if not all(map(_finite, results)):
                    continue
                fresh = [
                    None if grad is None else _like(result, generator)
                    for grad, result in zip(grads, results, strict=True)
                ]
                seen = self._gradient(values, fresh) if self.subset else self._result(values)
                if self.subset:
                    seen = self._without_kinks(seen, values, fresh)
            except Exception as error:
                refuse_own(error)  # what the operator does not take is drawn more gently
                continue
            if self.right is not None or _finite(seen.expected):
                return seen
        return None

    def _without_kinks(self, seen: Observation, flat: Sequence[Any], grads: Grads) -> Observation:
        """The same without the elements at a kink, at which either side is right."""
        if self.right is not None or seen.got is None or seen.got.shape != seen.expected.shape:
            return seen  # differences tell themselves where they say nothing
        jumps = self._across(flat, grads, KINK)
        size = float(seen.expected.abs().max()) if seen.expected.numel() else 0.0
        kinks = (jumps > 1e-3 * size) & seen.got.cpu().isfinite()
        if not bool(kinks.any()):
            return seen
        # A gradient that nearly vanishes, as at an optimum, is steep beside its size: no jump, if it shrinks.
        kinks &= self._across(flat, grads, KINK / 8) > jumps / 2
        if not bool(kinks.any()):
            return seen
        # Zeros say nothing, whatever the hypothesis: neither of a sign nor of a factor.
        got, expected = (torch.where(kinks, 0, each) for each in (seen.got.cpu(), seen.expected))
        return replace(seen, got=got, expected=expected)

    def _across(self, flat: Sequence[Any], grads: Grads, step: float) -> Tensor:
        """By how much each element of the right gradient differs so far to both sides of these arguments."""
        sides = []
        for side in (step, -step):
            generator = torch.Generator().manual_seed(APART)
            moved = [_moved(value, side, generator, least=1.0) for value in flat]
            sides.append(self._right(moved, (self.place,), grads)[0])
        return (sides[0] - sides[1]).abs()

    def _gradient(self, flat: Sequence[Any], grads: Grads) -> Observation:
        label = self.sample.labels[self.place]
        backward = partial(self._backward, flat)
        right = partial(self._right, flat)
        answers = dict(zip(self.subset, backward(self.subset, grads), strict=True))
        (expected,) = right((self.place,), grads)
        with torch.no_grad():
            results = self.subject.plain(self.sample)([replica(value) for value in flat])
        names = [result.name for result in self.subject.results(self.sample)]

        def others() -> dict[str, tuple[Tensor | None, Tensor]]:
            every = tuple(place for place in self.sample.inexact if place != self.place)
            theirs = right(every, grads) if every else []
            found: dict[str, tuple[Tensor | None, Tensor]] = {}
            for place, expected in zip(every, theirs, strict=True):
                got = answers.get(place)
                if place not in answers:
                    try:
                        (got,) = backward((place,), grads)
                    except Exception as error:
                        refuse_own(error)  # its own failure says what it raises
                found[self.sample.labels[place]] = (got, expected)
            return found

        return Observation(
            answers[self.place],
            expected,
            what=f"the gradient of `{label}`",
            about=label,
            inputs=dict(zip(self.sample.labels, flat, strict=True)),
            grads=dict(zip(names, grads, strict=True)),
            results={name: r.detach() for name, r in zip(names, results, strict=True)},
            others=others,
            backward=lambda incoming: backward(self.subset, incoming)[self.subset.index(self.place)],
            # Differences take a run for each element of the input: they are not asked again and again.
            right=None if self.right else lambda incoming: right((self.place,), incoming)[0],
            right_at=None if self.right else partial(self._right_at, flat, grads),
            paths=lambda: self._paths(flat, grads),
            near=partial(self._near, flat, grads),
            tolerance=None if self.right is None else torch.full(expected.shape, NUMERICAL * peak(expected)),
        )

    def _paths(self, flat: Sequence[Any], grads: Grads) -> Paths | None:
        """The ways through the reference; None where the right gradient is no sum over them."""
        if self.right is not None:
            return None
        return Paths(self.subject.plain(self.sample), flat, self.place, grads)

    def _right_at(self, flat: Sequence[Any], grads: Grads, changed: Mapping[str, Any]) -> Tensor | None:
        """What is right where some inputs are others; None where the reference does not take them."""
        pairs = zip(self.sample.labels, flat, strict=True)
        values = [changed.get(label, value) for label, value in pairs]
        try:
            return self._right(values, (self.place,), grads)[0]
        except Exception as error:
            refuse_own(error)  # other inputs than the sample's need not fit
            return None

    def _near(self, flat: Sequence[Any], grads: Grads, step: float, seed: int) -> Observation | None:
        generator = torch.Generator().manual_seed(seed)
        values, fresh = ([_moved(each, step, generator) for each in some] for some in (flat, grads))
        try:
            return self._gradient(values, fresh) if self.subset else self._result(values)
        except Exception as error:
            refuse_own(error)  # a boundary of the domain may be near
            return None

    def _backward(self, flat: Sequence[Any], places: Sequence[int], grads: Grads) -> list[Tensor | None]:
        """What the operator gives."""
        mine = [replica(value, self.dtype, self.device) for value in flat]
        incoming = [replica(grad, self.dtype, self.device) for grad in grads]
        call = partial(self.subject.call, self.sample)
        return vjp(call, mine, places, incoming) or [None] * len(places)

    def _right(self, flat: Sequence[Any], places: Sequence[int], grads: Grads) -> list[Tensor]:
        """What is right; zeros where autograd has nothing."""
        give = self.right or self._through_the_reference
        found = give(self.sample, [replica(value) for value in flat], places, grads) or [None] * len(places)
        return [
            torch.zeros_like(flat[place]) if gradient is None else gradient
            for place, gradient in zip(places, found, strict=True)
        ]

    def _through_the_reference(
        self, sample: Sample, flat: Sequence[Any], places: Sequence[int], grads: Grads
    ) -> list[Tensor | None] | None:
        return vjp(self.subject.plain(sample), flat, places, grads)

    def _result(self, flat: Sequence[Any]) -> Observation:
        run = self.run or self.subject.call
        got = run(self.sample, [replica(value, self.dtype, self.device) for value in flat])
        right = self.subject.plain(self.sample)([replica(value) for value in flat])
        name = self.subject.results(self.sample)[self.place].name
        return Observation(
            got[self.place],
            right[self.place],
            what=f"`{name}`",
            inputs=dict(zip(self.sample.labels, flat, strict=True)),
            near=partial(self._near, flat, ()),
        )


def _like(result: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.randn(result.shape, generator=generator, dtype=torch.float64)
    if result.is_complex():
        return torch.complex(drawn, torch.randn(result.shape, generator=generator, dtype=torch.float64))
    return drawn


def _moved(value: Any, step: float, generator: torch.Generator, *, least: float = 0.0) -> Any:
    """A value of which each element has moved by so much of its size, or of the least size that counts."""
    fresh = replica(value)
    if not is_inexact(fresh):
        return fresh
    signs = torch.randint(0, 2, fresh.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return fresh + step * signs.to(fresh.device) * fresh.abs().clamp_min(least)


def _finite(result: Tensor | None) -> bool:
    return result is None or not is_inexact(result) or bool(result.isfinite().all())


def _shapes(flat: Sequence[Any]) -> list[Any]:
    return [tuple(value.shape) if isinstance(value, Tensor) else None for value in flat]
