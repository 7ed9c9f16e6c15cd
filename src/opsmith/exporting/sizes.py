"""Sizes of tensors in a program of torch, of which some vary."""

from __future__ import annotations

from typing import Any

import torch

from opsmith import errors


def varies(size: Any) -> bool:
    """Whether a size may be another in the next call; a symbol that torch has found to be a number is none.

    Example:
        >>> varies(3)
        False
    """
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def example_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The sizes that a tensor had when the program was traced."""
    return tuple(example_size(size) for size in tensor.shape)


def example_size(size: Any) -> int:
    """A size, or the example of one that varies.

    Raises:
        ExportError: If it depends on values, so that there is none.
    """
    if not varies(size):
        return int(size)
    hint = size.node.hint  # `int(size)` would fix it
    if hint is None:
        raise errors.ExportError(
            "the size of a tensor depends on the values of others, and no body can be derived for it",
            got=str(size),
            hint="compute what has such a size outside of the operator, or export it with `body='node', "
            "verify=False`",
        )
    return int(hint)
