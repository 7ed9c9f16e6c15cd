"""Tensors made comparable, and when two of them are alike."""

from __future__ import annotations

import torch
from torch import Tensor


def alike(got: Tensor, expected: Tensor, coarse: float) -> bool:
    """Whether two tensors agree to a fraction `coarse` of the largest element."""
    if got.shape != expected.shape or not (bool(got.isfinite().all()) and bool(expected.isfinite().all())):
        return False
    largest = max(peak(expected), peak(got))
    return peak(got - expected) <= coarse * largest


def peak(tensor: Tensor) -> float:
    """The largest size of a finite element; 0 where there is none."""
    sizes = tensor.detach().abs()
    sizes = sizes[sizes.isfinite()]
    return float(sizes.max()) if sizes.numel() else 0.0


def wide(tensor: Tensor) -> Tensor:
    """A tensor on the CPU, in float64 or complex128, apart from autograd."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    return plain.to(torch.complex128 if plain.is_complex() else torch.float64)
