"""The three levels of effort of a check and of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeVar, get_args

from opsmith import errors
from opsmith.core.call_arguments import shown

Level = Literal["quick", "default", "thorough"]
Effort = TypeVar("Effort")


def no_such_level(name: object, call: str) -> errors.UsageError:
    """Return the error for an unknown level.

    Args:
        name: Value that was given.
        call: Name of the public function that takes a level.

    Example:
        >>> print(no_such_level("lazy", "check"))
        there is no such level of effort
          argument: effort
          expected: `quick`, `default`, `thorough`
          got: str 'lazy'
          hint: use one of these levels, as in `opsmith.check(operator, effort="thorough")`
          more: opsmith rule UsageError
    """
    return errors.UsageError(
        "there is no such level of effort",
        argument="effort",
        expected=", ".join(f"`{each}`" for each in get_args(Level)),
        got=shown(name),
        hint=f'use one of these levels, as in `opsmith.{call}(operator, effort="thorough")`',
    )


def effort_at(level: object, efforts: Mapping[str, Effort], call: str) -> Effort:
    """Return the effort of a level.

    Args:
        level: Name of the level.
        efforts: Efforts by level.
        call: Name of the public function that takes a level.

    Raises:
        UsageError: If there is no such level.

    Example:
        >>> effort_at("quick", {"quick": 1, "default": 2, "thorough": 3}, "check")
        1
    """
    if isinstance(level, str) and level in efforts:
        return efforts[level]
    raise no_such_level(level, call)
