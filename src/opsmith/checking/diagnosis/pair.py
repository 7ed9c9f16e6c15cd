"""What came and what is right, made comparable, with the distance at which they count as alike.

A guess must explain the whole difference, not most of it: what it predicts has to be nearer to what came than
the right one is by a factor of `EXPLAINED`, and no nearer than rounding lets two ways of computing come.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from opsmith.checking.diagnosis.comparable import peak, wide
from opsmith.checking.diagnosis.observation import Observation
from opsmith.checking.diagnosis.summed import Terms, terms_of

if TYPE_CHECKING:
    from opsmith.checking.diagnosis.paths import Paths

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
