"""The three levels of effort of a check and of a benchmark."""

from __future__ import annotations

from typing import Literal, get_args

from opsmith import errors
from opsmith.core.call_arguments import shown

Level = Literal["quick", "default", "thorough"]


def no_such_level(name: object, call: str) -> errors.UsageError:
    """Return the error for an unknown level.

    Args:
        name: What was given.
        call: Name of the public function that takes a level.

    Example:
        >>> print(no_such_level("lazy", "check"))
        there is no such level of effort
          argument: effort
          expected: `quick`, `default`, `thorough`
          got: str 'lazy'
          hint: take one of them, as in `opsmith.check(operator, effort="thorough")`
    """
    return errors.UsageError(
        "there is no such level of effort",
        argument="effort",
        expected=", ".join(f"`{each}`" for each in get_args(Level)),
        got=shown(name),
        hint=f'take one of them, as in `opsmith.{call}(operator, effort="thorough")`',
    )
