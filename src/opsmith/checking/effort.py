"""How much a check looks at."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from opsmith import errors

Level = Literal["quick", "default", "thorough"]

LARGE = 40_000
"""How many elements a sample has at most for as many to be moved as the effort says."""

LEAST = 16
"""So many elements are moved however large a sample is."""


@dataclass(frozen=True)
class Effort:
    """What a level of effort comes to.

    Args:
        name: `quick`, `default` or `thorough`; of an effort of one's own, that by which the properties choose
            what is not said here.
        variations: How many inputs to derive from the author's samples, at most.
        layouts: How many layouts of inputs and incoming gradients to try, each alone; None for all.
        elements: How many elements of a sample finite differences move one at a time; beyond, some of them
            and random directions stand for all.
        fresh: On how many fresh inputs a hypothesis about a cause is tested.
        compiled: Whether the operator is compiled and exported.
        repeats: How often what should be the same each time is run.

    Raises:
        UsageError: If the name is that of no level.

    Example:
        >>> from dataclasses import replace
        >>> replace(EFFORTS["quick"], variations=10).variations
        10
    """

    name: Level
    variations: int
    layouts: int | None
    elements: int
    fresh: int
    compiled: bool
    repeats: int

    def __post_init__(self) -> None:
        if self.name not in get_args(Level):
            raise no_such_level(self.name)

    def moved(self, size: int) -> int:
        """How many elements of a large sample to move: fewer, for each move costs a run over all of it.

        Args:
            size: How many elements the sample has.

        Example:
            >>> EFFORTS["quick"].moved(100), EFFORTS["quick"].moved(1_000_000)
            (64, 16)
        """
        return max(min(self.elements, LEAST), min(self.elements, self.elements * LARGE // max(size, 1)))


EFFORTS = MappingProxyType(
    {
        "quick": Effort("quick", 3, 7, 64, 2, False, 2),
        "default": Effort("default", 12, None, 2048, 3, True, 3),
        "thorough": Effort("thorough", 60, None, 16384, 6, True, 10),
    }
)


def effort_named(name: str) -> Effort:
    """The effort of a level.

    Raises:
        UsageError: If there is no such level.
    """
    if name not in EFFORTS:
        raise no_such_level(name)
    return EFFORTS[name]


def no_such_level(name: str) -> errors.UsageError:
    """The error for a name that is none of a level."""
    return errors.UsageError(
        "there is no such level of effort",
        argument="effort",
        expected=", ".join(f"`{each}`" for each in get_args(Level)),
        got=repr(name),
        hint='take one of them, as in `opsmith.check(operator, effort="thorough")`',
    )
