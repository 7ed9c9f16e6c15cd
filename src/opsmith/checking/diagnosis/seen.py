"""The first pair and fresh ones: a guess is proposed on the first and must hold on all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from opsmith.checking.diagnosis.observation import Observation
from opsmith.checking.diagnosis.pair import Pair

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
