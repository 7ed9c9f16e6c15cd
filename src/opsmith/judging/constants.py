"""Constants of the error model: the allowed errors of a right result, and their measurement.

Constants of finite differences and their error bounds are in the modules that compute these.
"""

from __future__ import annotations

import math

import torch

LIBRARY = 8
"""Maximum error of a library function, in roundings."""

SUMMATION = 2
"""Allowed roundings per square root of the number of summands."""

MOVES = 16
"""Number of random moves: four moves are all alike once in a hundred times, 16 moves once in 1e8."""

FIRST_MOVES = 4
"""Number of moves after which a difference is judged for the first time."""

PLATEAU = 2.0
"""Maximum ratio of an element to its value for larger arguments; near a pole, each factor gives 8 or more."""

SHRUNK = (2.0**-2, 2.0**-5, 2.0**-8, 2.0**-12, 2.0**-16)
"""Factors that make arguments smaller; near the last factor, logits of a thousand saturate nothing."""

ROOM = 16.0
"""Ratio of terms to the size of derivatives in other samples, in which some terms cancel as well."""

SMOOTH = (1 / 16, 1 / 2)
"""Share of a smooth function's second difference that remains with half of the step: a quarter, or a
sixteenth if the function is flat up to the fourth order."""

FEW_DIGITS = (torch.bfloat16, torch.float16)
"""dtypes of half precision, in which the error of the function itself proves nothing."""

PROBES = 3
"""Number of result elements of which the input elements are counted."""

NEAR = 2.0**-10
"""Relative move to arguments that round differently."""


def allowed_roundings(summands: int) -> float:
    """Return the maximum error, in roundings, of a right computation with so many summands."""
    return LIBRARY + SUMMATION * math.sqrt(summands)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return half of the dtype's eps: the maximum relative error of one rounding."""
    return float(torch.finfo(dtype).eps) / 2


def half_of_digits(dtype: torch.dtype) -> float:
    """Return the share to which two computations of a value in a dtype agree: half of its digits."""
    return math.sqrt(torch.finfo(dtype).eps)
