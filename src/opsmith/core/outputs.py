"""The structure of what the forward of a Function class returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Outputs = int | None | tuple["Outputs", ...]
"""The position of a result, None, or a tuple of such."""


class MisfitError(Exception):
    """A value that does not have the structure: what was expected there, and what came."""

    def __init__(self, outputs: Outputs, value: Any) -> None:
        super().__init__(outputs, value)
        self.outputs, self.value = outputs, value


def leaves(outputs: Outputs, value: Any) -> Iterator[tuple[int | None, Any]]:
    """The parts of a value that lie where results, or None, are expected, each with its result's position.

    Raises:
        MisfitError: If a tuple is expected, and the value is none of that length.

    Example:
        >>> list(leaves((0, None, (1,)), ("a", None, ("b",))))
        [(0, 'a'), (None, None), (1, 'b')]
    """
    if not isinstance(outputs, tuple):
        yield outputs, value
    elif not isinstance(value, tuple | list) or len(value) != len(outputs):
        raise MisfitError(outputs, value)
    else:
        for inner, part in zip(outputs, value, strict=True):
            yield from leaves(inner, part)


def structured(outputs: Outputs, results: Sequence[Any]) -> Any:
    """Results, given in a row, in this structure; inverse of `leaves`.

    Example:
        >>> structured((0, None, (1,)), ["a", "b"])
        ('a', None, ('b',))
    """
    if isinstance(outputs, tuple):
        return tuple(structured(inner, results) for inner in outputs)
    return None if outputs is None else results[outputs]


def side_by_side(outputs: Outputs) -> tuple[int | None, ...]:
    """For each output at the top the position of its result; None where it is no tensor of its own.

    What lies in a tuple inside of the tuple is no output to torch, and has no gradient.

    Example:
        >>> side_by_side((0, None, (1, 2)))
        (0, None, None)
    """
    top = outputs if isinstance(outputs, tuple) else (outputs,)
    return tuple(each if isinstance(each, int) else None for each in top)
