"""Whether two runs gave the same: bit for bit, or but for rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from opsmith.checking.bits import same_bits
from opsmith.checking.diagnosis.comparable import alike
from opsmith.checking.difference import unequal
from opsmith.checking.sample import is_inexact


def differ(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors differ by more than rounding; nan equals nan, and nothing is only like nothing.

    Example:
        >>> differ(torch.tensor(0.1) * 3, torch.tensor(0.3)), differ(torch.tensor(1), torch.tensor(2))
        (False, True)
    """
    if one is None or other is None:
        return one is not other
    if same_bits(one, other):
        return False
    if one.shape != other.shape or one.dtype != other.dtype:
        return True
    return unequal(other, one) is not None and not by_rounding(one, other)


def by_rounding(one: Tensor, other: Tensor) -> bool:
    """Whether rounding explains a difference: finite numbers are alike, and the others the same."""
    if not is_inexact(one) or one.dtype != other.dtype or one.shape != other.shape:
        return False
    odd = ~(one.isfinite() & other.isfinite())
    if bool(odd.any()) and unequal(other[odd], one[odd]) is not None:
        return False
    coarse = torch.finfo(one.dtype).eps ** 0.5
    return alike(other.masked_fill(odd, 0), one.masked_fill(odd, 0), coarse)


def what_differs(one: Tensor | None, other: Tensor | None) -> str:
    """In what a tensor differs from the right one, in words.

    Args:
        one: The right one.
        other: What came.
    """
    if one is None or other is None:
        return "there is none (None)" if other is None else "there is one where there was none"
    if one.shape != other.shape:
        return f"its shape is {list(other.shape)} where {list(one.shape)} is right"
    if one.dtype != other.dtype:
        return f"its dtype is {other.dtype} where {one.dtype} is right"
    return str(unequal(other, one))
