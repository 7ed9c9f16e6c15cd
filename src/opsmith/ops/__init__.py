"""The operators that come with opsmith, written with its public API alone, and there to be copied."""

from __future__ import annotations

from opsmith.ops.elementwise import add, exp, mul
from opsmith.ops.involution import involution
from opsmith.ops.linear import linear

__all__ = ["add", "exp", "involution", "linear", "mul"]
