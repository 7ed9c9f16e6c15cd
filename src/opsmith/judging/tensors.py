"""Tensors as numbers: copies in other dtypes, perturbed copies, and dense copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.torch_library.arguments import unsupported_kind

CPU = torch.device("cpu")
"""Device on which a check computes; the tensors of a call stay on the device that the author chose."""


def is_inexact(value: Any) -> bool:
    """Return True if a value is a floating or complex tensor, which may have a gradient."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def replica(value: Any, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Any:
    """Copy a tensor with its strides, or a generator with its state; return other values unchanged."""
    if not isinstance(value, Tensor):
        return value.clone_state() if isinstance(value, torch.Generator) else value
    target = value.dtype
    if dtype is not None and is_inexact(value):
        target = dtype.to_complex() if value.is_complex() else dtype
    # The whole storage is copied, so that expanded, sliced and overlapping tensors keep their strides.
    plain = value.detach().resolve_conj().resolve_neg()
    stored = plain.untyped_storage().nbytes() // plain.element_size()
    if stored == plain.numel() and plain.is_contiguous():
        return plain.to(device=device, dtype=target, copy=True)
    storage = plain.as_strided((stored,), (1,), 0).to(device=device, dtype=target, copy=True)
    return storage.as_strided(plain.shape, plain.stride(), plain.storage_offset())


def perturbed(value: Any, step: float, generator: torch.Generator) -> Any:
    """Move each number of a tensor up or down by a relative step; return any other value unchanged.

    The move is computed in float64 and rounded once: a step below the eps of the dtype moves few numbers, and
    a larger step moves all.

    Args:
        value: Floating or complex tensor of any dtype, or any other value.
        step: Relative step.
        generator: Source of the signs.

    Example:
        >>> moved = perturbed(torch.tensor([1.0, 4.0]), 0.25, torch.Generator().manual_seed(0))
        >>> (moved / torch.tensor([1.0, 4.0])).sub(1).abs()
        tensor([0.2500, 0.2500])
    """
    if not is_inexact(value):
        return value
    signs = torch.randint(0, 2, value.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return (value * (1 + step * signs.to(value.device))).to(value.dtype)


SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def dense(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Convert sparse gradients, such as an embedding table's, to dense tensors in memory.

    Some gradients of torch, such as of `torch.sgn`, are zeros without memory.

    Raises:
        LayoutError: If a gradient is nested or quantised, which cannot be compared.

    Example:
        >>> dense([torch.ones(1).to_sparse(), None])
        [tensor([1.]), None]
    """
    found = [None if each is None else _in_memory(each) for each in gradients]
    for each in found:
        foreign = None if each is None else unsupported_kind(each)
        if foreign is not None:
            raise errors.LayoutError(
                "a gradient must be a strided dense tensor",
                expected="torch.strided",
                got=foreign.name,
                hint=f"return `{foreign.hint.format('gradient')}`",
            )
    return found


def _in_memory(gradient: Tensor) -> Tensor:
    if gradient.layout in SPARSE:
        return gradient.to_dense()
    return gradient.clone() if gradient.layout == torch.strided and _without_memory(gradient) else gradient


def _without_memory(tensor: Tensor) -> bool:
    """True if a tensor has no memory of its own: zeros that torch has not allocated, or a traced tensor."""
    try:
        tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return True
    return False
