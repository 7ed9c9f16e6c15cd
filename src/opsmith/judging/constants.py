"""Constants of the error model: what is free for a right result, and how that is measured.

Numbers by which differences are taken, and their errors bounded, are in the modules that take them.
"""

from __future__ import annotations

import math

import torch

LIBRARY = 8
"""Roundings that a library function may err by."""

SUMMATION = 2
"""Roundings per square root of the number of summands."""

MOVES = 16
"""Random moves: of four all are alike once in a hundred times, of 16 once in 1e8."""

FIRST_MOVES = 4
"""Those after which a difference is judged for the first time."""

PLATEAU = 2.0
"""Largest ratio of an element to that of larger arguments; at a pole each factor enlarges it by 8 or more."""

SHRUNK = (2.0**-2, 2.0**-5, 2.0**-8, 2.0**-12, 2.0**-16)
"""Factors that make arguments smaller: near the last, logits of a thousand saturate nothing."""

ROOM = 16.0
"""Ratio of terms to the size that derivatives have in other samples, where some of them cancel as well."""

SMOOTH = (1 / 16, 1 / 2)
"""Share of the second difference of a smooth function that half of the steps leave: a quarter of it; a
sixteenth where it is flat up to the fourth order."""

FEW_DIGITS = (torch.bfloat16, torch.float16)
"""dtypes of half precision: the error of the function itself says nothing there."""

PROBES = 3
"""Number of result elements whose dependence is counted."""

NEAR = 2.0**-10
"""Relative move to arguments that round differently."""


def allowed_roundings(summands: int) -> float:
    """Return the number of roundings that a right computation with so many summands may err by."""
    return LIBRARY + SUMMATION * math.sqrt(summands)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return half of the dtype's eps: the largest relative error of one rounding."""
    return float(torch.finfo(dtype).eps) / 2


def half_of_digits(dtype: torch.dtype) -> float:
    """Return the share to which two ways to compute one thing in a dtype agree: half of its digits."""
    return math.sqrt(torch.finfo(dtype).eps)
