"""Involution (arXiv:2103.06255): three operators that are gradients of each other, and a layer.

`operators` declares them and their kernels, with sources in `cpu` and `cuda`; `layer` has `Involution2d`.
"""

from __future__ import annotations

from opsmith.ops.involution.layer import Involution2d
from opsmith.ops.involution.operators import involution, involution_input_gradient, involution_weight_gradient

__all__ = ["Involution2d", "involution", "involution_input_gradient", "involution_weight_gradient"]
