"""Matrices of cases: `make test` runs a diagonal of each, `make test-all` the rest of it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def diagonal(*axes: Iterable[Any], every: int) -> list[Any]:
    """All combinations of the values of some axes as `parametrize` takes them, most of them marked as slow.

    Those whose positions add up to a multiple of `every` are not slow. Each value of an axis is among them as
    often as any other; with three axes, so is each pair of values.

    Args:
        axes: The values of each parameter, with readable text or a `name`.
        every: Number of combinations of which one is not slow; no larger than the longest axis.
    """
    found = []
    for combination in product(*(enumerate(axis) for axis in axes)):
        values = [value for _, value in combination]
        slow = sum(position for position, _ in combination) % every
        name = "-".join(str(getattr(value, "name", value)) for value in values)
        found.append(pytest.param(*values, id=name, marks=pytest.mark.slow if slow else ()))
    return found
