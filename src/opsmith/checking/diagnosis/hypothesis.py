"""Hypotheses: the wrong tensor beside the right one, proposed on the first input and tested on fresh ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opsmith.checking.diagnosis.observation import Observation
from opsmith.checking.diagnosis.terms import Terms, terms_of
from opsmith.checking.numerics.compare import peak, wide

if TYPE_CHECKING:
    from opsmith.checking.diagnosis.detectors.paths import Paths

EXPLAINED = 1e-4
SHOWS = 1e-7
"""Share of the largest error from which an element counts as wrong."""

ROUNDINGS = 256
"""How many roundings of the largest element two right ways of computing may lie apart."""


@dataclass(frozen=True)
class Pair:
    """An observation's two tensors, on the CPU and in the same wide dtype.

    Args:
        observation: Where they come from.
    """

    observation: Observation

    @cached_property
    def right(self) -> Tensor:
        """What is right."""
        return wide(self.observation.expected)

    @cached_property
    def mine(self) -> Tensor:
        """What came; zeros where nothing came."""
        got = self.observation.got
        return torch.zeros_like(self.right) if got is None else wide(got).to(self.right.dtype)

    @cached_property
    def same_shape(self) -> bool:
        """Whether elements can be compared one by one."""
        return self.mine.shape == self.right.shape

    @cached_property
    def error(self) -> Tensor:
        """How far each element is off; 0 where the right one is no finite number."""
        if not self.same_shape:
            return self.right.abs().nan_to_num(0.0, 0.0)
        judged = self.right.isfinite()
        return torch.where(judged, (self.mine - self.right).abs(), 0.0)

    @cached_property
    def rounding(self) -> float:
        """What rounding alone can make of the largest element."""
        got = self.observation.got
        dtypes = [self.right.dtype] if got is None else [self.right.dtype, got.dtype]
        size = max(peak(self.right), peak(self.mine))
        return ROUNDINGS * max(torch.finfo(dtype).eps for dtype in dtypes) * size

    @cached_property
    def slack(self) -> Tensor:
        """How far each element may lie from what a guess predicts."""
        slack = torch.tensor(max(EXPLAINED * peak(self.error), self.rounding), dtype=torch.float64)
        tolerance = self.observation.tolerance
        return slack if tolerance is None else torch.maximum(slack, tolerance.cpu().to(torch.float64))

    @cached_property
    def near(self) -> bool:
        """Whether the difference is so small that any guess about a large one would hold as well."""
        return not bool((self.error.nan_to_num(float("inf")) > 16 * self.slack).any())

    @cached_property
    def wrong(self) -> Tensor:
        """Which elements are wrong, by however little of what the worst is."""
        least = torch.tensor(max(SHOWS * peak(self.error), self.rounding), dtype=torch.float64)
        tolerance = self.observation.tolerance
        if tolerance is not None:
            least = torch.maximum(least, tolerance.cpu().to(torch.float64))
        return self.error.nan_to_num(float("inf")) > least

    @cached_property
    def terms(self) -> Terms | None:
        """Where the input was broadcast, what the right gradient is summed from; else None."""
        return terms_of(self.observation, self.right)

    @cached_property
    def paths(self) -> Paths | None:
        """The ways through the reference, if they are known."""
        give = self.observation.paths
        return None if give is None else give()

    def is_(self, candidate: Tensor | None) -> bool:
        """Whether what came is what a guess predicts, everywhere."""
        if candidate is None or candidate.shape != self.mine.shape:
            return False
        return bool(self.agrees(candidate).all())

    def agrees(self, candidate: Tensor) -> Tensor:
        """Which elements are what a guess predicts; what is not finite has to be the same."""
        theirs = wide(candidate).to(self.mine.dtype)
        same = (self.mine == theirs) | (self.mine.isnan() & theirs.isnan())
        if self.same_shape:
            same |= ~self.right.isfinite()
        return same | ((self.mine - theirs).abs() <= self.slack)


SIZES = 8
"""At how many other sizes to look, at most."""


@dataclass(frozen=True)
class Seen:
    """What the hypotheses are tested on.

    Args:
        observation: The first observation, on which guesses are made.
    """

    observation: Observation

    @cached_property
    def first(self) -> Pair:
        """The pair that was found wrong."""
        return Pair(self.observation)

    @cached_property
    def fresh(self) -> tuple[Pair, ...]:
        """Pairs of the same shapes, from fresh inputs; none where nothing can be drawn anew."""
        again = self.observation.again
        if again is None:
            return ()
        drawn = [again(seed) for seed in range(1, self.observation.fresh + 1)]
        return tuple(Pair(each) for each in drawn if each is not None)

    @cached_property
    def more(self) -> tuple[Pair, ...]:
        """Further pairs of the same shapes, where the first ones do not tell conditions apart."""
        again = self.observation.again
        if again is None:
            return ()
        start = self.observation.fresh + 1
        drawn = [again(seed) for seed in range(start, start + self.observation.more)]
        return tuple(Pair(each) for each in drawn if each is not None)

    @cached_property
    def elsewhere(self) -> tuple[Pair, ...]:
        """Pairs at other sizes."""
        give = self.observation.elsewhere
        drawn = [draw(seed) for seed, draw in enumerate((give() if give else ())[:SIZES], start=1)]
        return tuple(Pair(each) for each in drawn if each is not None)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The first and the fresh ones."""
        return (self.first, *self.fresh)

    def everywhere(self, holds: Callable[[Pair], bool]) -> bool:
        """Whether something holds of the first pair and of every fresh one."""
        return holds(self.first) and all(holds(pair) for pair in self.fresh)


@dataclass(frozen=True)
class Found:
    """A cause that the evidence bears out.

    Args:
        cause: One of `opsmith.checking.causes`.
        reason: A sentence that says it, without a capital letter and a full stop.
        evidence: What was measured.
        weak: Whether it is only one way to see what another cause, if one is borne out, says better.
    """

    cause: str
    reason: str
    evidence: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    weak: bool = False


Hypothesis = Callable[[Seen], Iterator[Found]]
"""Proposes on the first pair, tests on all, and yields what holds."""
