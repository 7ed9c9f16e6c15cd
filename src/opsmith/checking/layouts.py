"""Incoming gradients in the memory layouts in which autograd hands them over.

`.sum()` hands back an expanded gradient (all strides 0), `.mT` and `cat` hand back strided ones. A formula
that counts on a contiguous gradient is wrong for them, and gradcheck, which only makes contiguous ones, does
not see it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

PLAIN = "contiguous"


Numbers = Callable[[Sequence[int]], Tensor]


def _plain(shape: Sequence[int], numbers: Numbers) -> Tensor:
    return numbers(shape)


def _expanded(shape: Sequence[int], numbers: Numbers) -> Tensor:
    return numbers(()).expand(tuple(shape))


def _transposed(shape: Sequence[int], numbers: Numbers) -> Tensor:
    if len(shape) == 1:
        return numbers((2 * shape[0],))[::2]
    reverse = list(reversed(range(len(shape))))
    return numbers([shape[i] for i in reverse]).permute(reverse)


LAYOUTS: dict[str, Callable[[Sequence[int], Numbers], Tensor]] = {
    PLAIN: _plain,
    "expanded": _expanded,
    "transposed": _transposed,
}


HANDED_BACK_BY = {"expanded": "`.sum()`", "transposed": "`.mT`"}
"""For each odd layout, an operation whose backward makes it."""


def incoming(like: Tensor, layout: str, generator: torch.Generator) -> Tensor:
    """A random gradient for a result, in a layout; its dtype and device are the result's.

    Example:
        >>> import torch
        >>> incoming(torch.ones(2, 3), "expanded", torch.Generator()).stride()
        (0, 0)
    """
    wide = torch.complex128 if like.is_complex() else torch.float64

    def numbers(shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=generator, dtype=wide).to(like.device, like.dtype)

    return LAYOUTS[layout](like.shape, numbers)
