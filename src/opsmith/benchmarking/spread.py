"""What times tell: their middle, how far they spread, and how sure a ratio is.

Noise of a computer only adds: times have a floor and a long tail. So the middle is the median, and the spread
is told by quartiles; a mean and a standard deviation would tell of the tail. Intervals come from the order of
the numbers alone, and hold for every distribution: between the k-th smallest and the k-th largest of n
independent numbers lies the median with a chance of 1 - 2 P(Binomial(n, 1/2) < k) (W. J. Conover, "Practical
Nonparametric Statistics", 3rd edition, 1999, section 3.2).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

SURE = 0.95
"""How often an interval holds the median, at least, where there are numbers enough."""


@dataclass(frozen=True)
class Spread:
    """What some times come to.

    Args:
        median: Their middle.
        low, high: Their quartiles: half of the times lie between.
        least: The smallest.
        count: How many there are.
    """

    median: float
    low: float
    high: float
    least: float
    count: int

    @property
    def relative(self) -> float:
        """Half the distance between the quartiles, as a part of the median."""
        return (self.high - self.low) / 2 / self.median if self.median else 0.0


def spread(numbers: Sequence[float]) -> Spread:
    """The median of some numbers, and how they spread.

    Example:
        >>> spread([3.0, 1.0, 2.0, 100.0, 2.5])
        Spread(median=2.5, low=2.0, high=3.0, least=1.0, count=5)
    """
    if len(numbers) == 1:
        return Spread(numbers[0], numbers[0], numbers[0], numbers[0], 1)
    low, median, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return Spread(median, low, high, min(numbers), len(numbers))


@dataclass(frozen=True)
class Ratio:
    """How many times as much, with the interval that holds it.

    Args:
        median: The middle of the ratios within each round.
        low, high: Between these the true median lies, as often as `sure` says.
        sure: How often.
    """

    median: float
    low: float
    high: float
    sure: float


def ratio(numbers: Sequence[float], others: Sequence[float]) -> Ratio:
    """How many times as much the numbers are, round by round: what slows a whole round down falls out.

    Args:
        numbers: One for each round.
        others: What each is divided by.

    Example:
        >>> ratio([2.0, 20.0, 2.2, 1.8, 2.1, 1.9], [1.0, 10.0, 1.0, 1.0, 1.0, 1.0])
        Ratio(median=2.0, low=1.8, high=2.2, sure=0.96875)
    """
    ratios = sorted(one / other for one, other in zip(numbers, others, strict=True))
    skipped, sure = _skipped(len(ratios))
    return Ratio(statistics.median(ratios), ratios[skipped], ratios[-1 - skipped], sure)


def _skipped(count: int) -> tuple[int, float]:
    """How many of the smallest, and of the largest, lie outside of the interval; and how often it holds."""
    outside, skipped = 2 * 0.5**count, 0
    for k in range(1, (count + 1) // 2):
        more = outside + 2 * math.comb(count, k) * 0.5**count
        if more > 1 - SURE:
            break
        outside, skipped = more, k
    return skipped, 1 - outside
