"""Paged cache of keys and values, as in servers of language models.

Memory is divided into blocks of equal size, and a sequence can use any blocks. A slot stores one token: with
blocks of S slots, block b has the slots from b S to (b + 1) S - 1.

Source: W. Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
SOSP 2023, arXiv:2309.06180, section 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import opsmith


@opsmith.operator(
    "opsmith::write_kv_cache",
    mutates=["key_cache", "value_cache"],
    shapes="key_cache: blocks S H D, value_cache: blocks S H E, key: N H D, value: N H E, slots: N ->",
)
def write_kv_cache(key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Write the keys and values of N tokens into their slots of a paged cache.

    Args:
        key_cache: [blocks, S, H, D], with S slots in a block and H heads; written.
        value_cache: [blocks, S, H, E]; written.
        key: [N, H, D], of the cache's dtype.
        value: [N, H, E], of the cache's dtype.
        slots: [N], int64, all different. A token whose slot is negative, such as padding, is left out.

    Raises:
        ShapeError, MutationError: If a shape is wrong, or a tensor cannot be written.
        KernelError, IndexError, ValueError: If a slot is beyond the cache, or dtypes differ. On a GPU a slot
            beyond the cache aborts the kernel, as in torch's indexing.

    Example:
        >>> import torch
        >>> keys, values = torch.zeros(2, 2, 1, 1), torch.zeros(2, 2, 1, 1)
        >>> new = torch.tensor([5.0, 6.0, 7.0]).view(3, 1, 1)
        >>> write_kv_cache(keys, values, new, -new, torch.tensor([3, -1, 0]))
        >>> keys.flatten(), values.flatten()
        (tensor([7., 0., 0., 5.]), tensor([-7.,  0.,  0., -5.]))
    """
    if (key.dtype, value.dtype) != (key_cache.dtype, value_cache.dtype):
        raise ValueError(
            f"keys and values are {key.dtype} and {value.dtype}, but the caches are {key_cache.dtype} and "
            f"{value_cache.dtype}"
        )
    written, size = slots >= 0, key_cache.shape[1]
    places = torch.arange(key_cache.shape[0] * size, device=slots.device)
    slot = places.index_select(0, slots[written])  # raises for a slot beyond the cache
    block, offset = slot // size, slot % size
    key_cache.index_put_((block, offset), key[written])
    value_cache.index_put_((block, offset), value[written])


@write_kv_cache.fake
def _(key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Do nothing: the operator returns nothing, and sizes in the reference depend on data."""


_DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
write_kv_cache.kernel("cpu", cpp_file="kv_cache.cpp", dtypes=_DTYPES)
write_kv_cache.kernel(
    "cuda", cuda_file="kv_cache.cu", dtypes=_DTYPES, grid="slots.numel", block=(16, 16), max_spills=0
)


@write_kv_cache.samples
def _(make: opsmith.Make) -> Iterator[Any]:
    for blocks, size, heads, dim, slots in (
        (35, 4, 2, 3, [7, 0, 139]),  # enough slots for additional tokens
        (70, 2, 1, 2, [-1, 139, 3]),
        (1, 1, 2, 2, [-1, -1]),
    ):
        places = torch.tensor(slots, dtype=torch.int64, device=make.device)
        yield (
            make(blocks, size, heads, dim),
            make(blocks, size, heads, dim + 1),
            make(len(slots), heads, dim),
            make(len(slots), heads, dim + 1),
            places,
        )
