"""How long a benchmark measures."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from opsmith import errors
from opsmith.core.calls import shown

Level = Literal["quick", "default", "thorough"]


@dataclass(frozen=True)
class Effort:
    """What a level of effort comes to.

    Args:
        name: `quick`, `default` or `thorough`.
        elements: How many elements the inputs have together, about, in each size that is grown from a sample.
        least, most: How many rounds there are: more than `least` only while the medians are unsteady.
        turn_s: How long a turn takes: a call that is shorter is made several times.
        budget_s: How long all rounds of one size in one direction may take, once there are `least`.
        slowest_s: Sizes beyond one at which a call takes so long are left out.
    """

    name: Level
    elements: tuple[int, ...]
    least: int
    most: int
    turn_s: float
    budget_s: float
    slowest_s: float


EFFORTS = MappingProxyType(
    {
        "quick": Effort("quick", (1 << 16,), 7, 7, 0.002, 1.0, 0.5),
        "default": Effort("default", (1 << 12, 1 << 16, 1 << 20), 11, 31, 0.01, 10.0, 2.0),
        "thorough": Effort(
            "thorough", (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22), 21, 61, 0.02, 60.0, 10.0
        ),
    }
)


def effort_named(name: object) -> Effort:
    """The effort of a level.

    Raises:
        UsageError: If there is no such level.

    Example:
        >>> effort_named("quick").least
        7
    """
    if isinstance(name, str) and name in EFFORTS:
        return EFFORTS[name]
    raise errors.UsageError(
        "there is no such level of effort",
        argument="effort",
        expected=", ".join(f"`{each}`" for each in get_args(Level)),
        got=shown(name),
        hint='take one of them, as in `opsmith.benchmark(operator, effort="thorough")`',
    )
