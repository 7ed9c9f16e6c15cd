"""Values moved by a small part of themselves, so that what is computed from them rounds in another way."""

from __future__ import annotations

from typing import Any

import torch

from opsmith.checking.sample import is_inexact


def nudged(value: Any, step: float, generator: torch.Generator) -> Any:
    """A tensor of which each number is moved up or down by a part of itself; any other value as it is.

    It is moved in float64 and rounded once, so that a step below the eps of the dtype moves no more than it
    should, and one above it moves every number.

    Args:
        value: A floating or complex tensor, of any dtype, or anything else.
        step: That part.
        generator: Source of the signs.

    Example:
        >>> moved = nudged(torch.tensor([1.0, 4.0]), 0.25, torch.Generator().manual_seed(0))
        >>> (moved / torch.tensor([1.0, 4.0])).sub(1).abs()
        tensor([0.2500, 0.2500])
    """
    if not is_inexact(value):
        return value
    signs = torch.randint(0, 2, value.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return (value * (1 + step * signs.to(value.device))).to(value.dtype)
