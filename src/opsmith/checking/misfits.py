"""What comes back in a form in which there is nothing to compare it with."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from opsmith.checking.mistakes import AboutOperatorError


class WrongCountError(AboutOperatorError):
    """A list of another length than the reference's came back: there is nothing to compare its tensors with.

    Args:
        result: Name of the result.
        got: Length of its list.
        expected: Length of the reference's.
        where: `file:line` of what returned it.
    """

    def __init__(self, result: str, got: int, expected: int, where: str) -> None:
        tensors = f"{got} tensor{'s' * (got != 1)}"
        super().__init__(f"it returns {tensors} for `{result}`, and the reference {expected}")
        self.result, self.where = result, where


class WrongFormError(AboutOperatorError):
    """What a class returned has another structure than that of the run that told its results.

    Args:
        result: Name of its first result.
        got: What came, in words.
        expected: What was there in that run, in words.
        where: `file:line` of what returned it.
    """

    def __init__(self, result: str, got: str, expected: str, where: str) -> None:
        super().__init__(f"it returns {got}, and in an earlier call returned {expected} in its place")
        self.result, self.where = result, where


def in_words(value: Any) -> str:
    """What a part of what is returned is; of a tuple or list, how many parts it has.

    Example:
        >>> in_words((1, 2)), in_words(0.5)
        ('2 values', 'a float')
    """
    if isinstance(value, tuple | list):
        return f"{len(value)} value{'s' * (len(value) != 1)}"
    return "a tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
