"""Shipping: kernels that are built before they reach those who use them."""

from __future__ import annotations

from opsmith.shipping.torch_library import TorchLibrary, build_torch_library

__all__ = ["TorchLibrary", "build_torch_library"]
