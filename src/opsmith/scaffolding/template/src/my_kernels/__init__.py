"""Operators for PyTorch, written with opsmith."""

from my_kernels.ops import Swish, swish

__all__ = ["Swish", "swish"]
__version__ = "0.1.0"
