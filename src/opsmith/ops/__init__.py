"""The operators that come with opsmith, written with its public API alone, and there to be copied.

Each is there as a function, in small letters; those that have parameters or are activations, as a module too.
`Involution2d` is the whole layer around `involution`; `opsmith.ops.rednet` has the networks of such layers.
"""

from __future__ import annotations

from opsmith.ops.elementwise import Add, Exp, Mul, add, exp, mul
from opsmith.ops.involution import Involution2d, involution
from opsmith.ops.linear import Linear, linear

__all__ = ["Add", "Exp", "Involution2d", "Linear", "Mul", "add", "exp", "involution", "linear", "mul"]
