"""Which properties are checked: all, or those that a caller names, less those that he leaves out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from opsmith import errors
from opsmith.checking.properties import EVERY, GROUPS, PROPERTIES
from opsmith.core.calls import shown


def selected(
    only: Iterable[str] | None, skip: Iterable[str] | None, also: Iterable[str] = ()
) -> frozenset[str]:
    """The properties that are to be checked.

    Args:
        only: As of `check`.
        skip: As of `check`.
        also: Names of properties that are asked for by options of their own.

    Raises:
        UsageError: If a name is no property or no string, or nothing is left.

    Example:
        >>> sorted(selected(["forward", "integration"], ["compile", "export", "opcheck"]))
        ['autocast', 'forward', 'serialization']
    """
    chosen, unwanted = _known(only), _known(skip) or frozenset()
    wanted = ((frozenset(PROPERTIES) if chosen is None else chosen) | frozenset(also)) - unwanted
    if not wanted:
        raise errors.UsageError(
            "nothing is left to check",
            expected="one property at least that `only` has and `skip` has not",
            got=f"only={'all' if chosen is None else sorted(chosen)}, skip={sorted(unwanted)}",
            mend="leave `only` or `skip` out, or name other properties",
        )
    return wanted


def _known(names: Iterable[str] | None) -> frozenset[str] | None:
    if names is None:
        return None
    given = _names(names)
    found = frozenset(each for name in given for each in GROUPS.get(name, (name,)))
    unknown = sorted(found - set(EVERY))
    if unknown:
        every = [*EVERY, *GROUPS]
        close = difflib.get_close_matches(unknown[0], every, n=1)
        raise errors.UsageError(
            f"there is no property `{unknown[0]}`",
            expected=", ".join(f"`{name}`" for name in every),
            mend=f"write `{close[0]}`" if close else "take one of those names for `only` or `skip`",
        )
    return found


def _names(given: Any) -> list[str]:
    """The names that a caller gives, in a list or alone."""
    names = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise errors.UsageError(
            "`only` and `skip` take names of properties",
            expected="a list of strings",
            got=shown(given),
            mend='call `check(operator, only=["forward", "gradient"])`',
        )
    return names
