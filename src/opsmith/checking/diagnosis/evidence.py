"""Evidence of a fault: a wrong tensor beside the right one, on the first input and on fresh ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opsmith.checking.diagnosis.observation import Observation
from opsmith.checking.numerics.compare import in_double, is_close, largest_magnitude, share_of_largest
from opsmith.core.cached_property import cached_property

if TYPE_CHECKING:
    from opsmith.checking.diagnosis.gradient_paths import GradientPaths

EXPLAINED = 1e-4
"""Share of the largest error that may be left where a hypothesis explains a difference."""
SHOWS = 1e-7
"""Share of the largest error from which an element counts as wrong."""

ROUNDINGS = 256
"""Roundings of the largest element that two right computations may differ by."""


@dataclass(frozen=True, eq=False)
class Pair:
    """The two tensors of an observation, on the CPU and in the same double precision dtype.

    Args:
        observation: Source of the tensors.
    """

    observation: Observation

    @cached_property
    def expected(self) -> Tensor:
        """The right tensor."""
        return in_double(self.observation.expected)

    @cached_property
    def got(self) -> Tensor:
        """The computed tensor; zeros where there is none."""
        got = self.observation.got
        return torch.zeros_like(self.expected) if got is None else in_double(got).to(self.expected.dtype)

    @cached_property
    def same_shape(self) -> bool:
        """True if elements can be compared one by one."""
        return self.got.shape == self.expected.shape

    @cached_property
    def error(self) -> Tensor:
        """Error of each element; 0 where the right one is not finite."""
        if not self.same_shape:
            return self.expected.abs().nan_to_num(0.0, 0.0)
        judged = self.expected.isfinite()
        return torch.where(judged, (self.got - self.expected).abs(), 0.0)

    @cached_property
    def rounding(self) -> float:
        """Bound of the rounding error of the largest element."""
        got = self.observation.got
        dtypes = [self.expected.dtype] if got is None else [self.expected.dtype, got.dtype]
        coarsest = max(torch.finfo(dtype).eps for dtype in dtypes)
        return share_of_largest(ROUNDINGS * coarsest, self.expected, self.got)

    @cached_property
    def slack(self) -> Tensor:
        """Bound of each element's distance from the prediction of a hypothesis."""
        return self._bound(EXPLAINED)

    def _bound(self, share: float) -> Tensor:
        """Return the allowed error of each element, at least a share of the largest error."""
        least = torch.tensor(max(share * largest_magnitude(self.error), self.rounding), dtype=torch.float64)
        tolerance = self.observation.tolerance
        return least if tolerance is None else torch.maximum(least, tolerance.cpu().to(torch.float64))

    @cached_property
    def is_small(self) -> bool:
        """True if the difference is so small that a hypothesis about a large one would hold as well."""
        return not bool((self.error.nan_to_num(float("inf")) > 16 * self.slack).any())

    @cached_property
    def wrong(self) -> Tensor:
        """Mask of the wrong elements, however small their error is relative to the worst."""
        return self.error.nan_to_num(float("inf")) > self._bound(SHOWS)

    @cached_property
    def paths(self) -> GradientPaths | None:
        """Paths through the reference, if they are known."""
        make = self.observation.paths
        return None if make is None else make()

    def with_grads(self, change: Callable[[str, Tensor], Tensor]) -> Tensor | None:
        """Compute the right gradient with each grad_output changed; None where it cannot be computed."""
        compute, grads = self.observation.expected_for, self.observation.grads.items()
        changed = [None if grad is None else change(name, grad) for name, grad in grads]
        return None if compute is None else in_double(compute(changed))

    def with_inputs(self, changed: Mapping[str, Any]) -> Tensor | None:
        """Compute the right gradient with some inputs changed; None where it cannot be computed."""
        compute = self.observation.expected_at
        found = None if compute is None else compute(changed)
        return None if found is None else in_double(found)

    def equals(self, candidate: Tensor | None) -> bool:
        """Return True if the computed tensor is the predicted one, in every element."""
        if candidate is None or candidate.shape != self.got.shape:
            return False
        return bool(self.agrees_with(candidate).all())

    def agrees_with(self, candidate: Tensor) -> Tensor:
        """Mark the elements that are as predicted; those that are not finite must be the same."""
        close = is_close(self.got, in_double(candidate).to(self.got.dtype), self.slack)
        return close | ~self.expected.isfinite() if self.same_shape else close


Prediction = Callable[[Pair], Tensor | None]
"""Computes what the computed tensor of a pair is if a hypothesis holds; None where it says nothing."""

SIZES = 8
"""Largest number of other sizes."""


@dataclass(frozen=True)
class Evidence:
    """Pairs that hypotheses are tested on.

    Args:
        observation: The first observation, on which hypotheses are made.
    """

    observation: Observation

    @cached_property
    def first(self) -> Pair:
        """The pair that was found wrong."""
        return Pair(self.observation)

    @cached_property
    def fresh(self) -> tuple[Pair, ...]:
        """Pairs of the same shapes, from fresh inputs; none where nothing can be drawn again."""
        return self._drawn(0, self.observation.fresh_count + 1)

    @cached_property
    def more(self) -> tuple[Pair, ...]:
        """Further pairs of the same shapes, where the first ones fit several conditions."""
        return self._drawn(self.observation.fresh_count + 1, self.observation.more_count)

    def _drawn(self, first: int, count: int) -> tuple[Pair, ...]:
        """Draw pairs with some seeds; where nothing can be drawn again, none."""
        again = self.observation.redraw
        drawn = [] if again is None else [again(seed) for seed in range(first, first + count)]
        return tuple(Pair(each) for each in drawn if each is not None)

    @cached_property
    def other_sizes(self) -> tuple[Pair, ...]:
        """Pairs at other sizes."""
        make = self.observation.at_other_sizes
        drawn = [draw(seed) for seed, draw in enumerate((make() if make else ())[:SIZES], start=1)]
        return tuple(Pair(each) for each in drawn if each is not None)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The first pair and the fresh ones."""
        return (self.first, *self.fresh)

    def everywhere(self, holds: Callable[[Pair], bool]) -> bool:
        """Return True if a statement holds for the first pair and for every fresh one."""
        return holds(self.first) and all(holds(pair) for pair in self.fresh)

    def fits(self, predicted: Prediction) -> bool:
        """Return True if the computed tensor is the predicted one in every pair."""
        return self.everywhere(lambda pair: pair.equals(predicted(pair)))

    def first_fitting(self, hypotheses: Iterable[tuple[Detection, Prediction]]) -> Iterator[Detection]:
        """Yield the first detection whose prediction every pair confirms."""
        yield from islice((found for found, predicted in hypotheses if self.fits(predicted)), 1)


@dataclass(frozen=True)
class Detection:
    """A cause that the evidence confirms.

    Args:
        cause: One of `opsmith.checking.causes`.
        reason: Sentence that states it, without a capital letter and a full stop.
        evidence: Measured values.
        weak: True if another confirmed cause describes the fault better.
    """

    cause: str
    reason: str
    evidence: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    weak: bool = False
