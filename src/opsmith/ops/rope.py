"""Rotary position embedding: rotate pairs of numbers by angles that grow with the position, in place.

Source: J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import opsmith


@opsmith.operator(
    "opsmith::rope_", mutates=["x"], returns="x", shapes="x: ... H D, cos_sin: P R, positions: ... -> ... H D"
)
def rope_(x: Tensor, cos_sin: Tensor, positions: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate each pair of numbers of queries or keys by an angle that its position determines, in place.

    With c = cos and s = sin of a pair's angle, (a, b) <- (a c - b s, b c + a s). The pairs are numbers i and
    i + R/2 of a head, for i < R/2, as in models since GPT-NeoX. With `interleaved` they are numbers 2i and 2i
    + 1.

    Args:
        x: [..., H, D], queries or keys of H heads, floating; written. R numbers of each head are rotated.
            cos_sin: [P, R], cosines and then sines of the angles of each position; `rope_table` makes it. R
            is even and at most D. The kernel takes float32, or float64 if x is float64.
        positions: [...], integers from 0 to P - 1.
        interleaved: True if the pairs are numbers 2i and 2i + 1.

    Returns:
        x.

    Raises:
        ShapeError, MutationError: If a shape is wrong, or a tensor cannot be written.
        KernelError, IndexError, ValueError: If a position is beyond the table, or R is invalid. On a GPU such
            a position aborts the kernel, as in torch's indexing.

    Example:
        >>> import torch
        >>> table = rope_table(3, 2)
        >>> rope_(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]), table, torch.tensor([0, 1]))
        tensor([[[ 1.0000,  0.0000]],
        <BLANKLINE>
                [[-0.8415,  0.5403]]])
    """
    if not (x.is_floating_point() or x.is_complex()):
        raise ValueError(f"x must be floating, not {x.dtype}")
    if cos_sin.shape[-1] % 2 or cos_sin.shape[-1] > x.shape[-1]:
        raise ValueError(
            f"cos_sin has {cos_sin.shape[-1]} columns: an even number is needed, of at most {x.shape[-1]}"
        )
    chosen = cos_sin.index_select(0, positions.flatten())
    cos, sin = chosen.reshape(*positions.shape, 1, cos_sin.shape[-1]).chunk(2, -1)
    turned, half = cos_sin.shape[-1], cos_sin.shape[-1] // 2
    if interleaved:
        first, second = slice(0, turned, 2), slice(1, turned, 2)
    else:
        first, second = slice(0, half), slice(half, turned)
    a, b = x[..., first].clone(), x[..., second].clone()  # a gradient of cos_sin needs them
    x[..., first] = a * cos - b * sin
    x[..., second] = b * cos + a * sin
    return x


@rope_.gradients("x")
def _(grad_x: Tensor, cos_sin: Tensor, positions: Tensor, interleaved: bool) -> dict[str, Tensor]:
    cos, sin = cos_sin.chunk(2, -1)
    return {"x": rope_.functional(grad_x, torch.cat([cos, -sin], -1), positions, interleaved)}


_DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
rope_.kernel("cpu", cpp_file="rope.cpp", dtypes=_DTYPES)
rope_.kernel(
    "cuda",
    cuda_file="rope.cu",
    dtypes=_DTYPES,
    grid="positions.numel",
    block=(8, "max(1, min(32, x.shape[-2]))"),
    max_spills=0,
)


def rope_table(
    positions: int,
    dim: int,
    base: float = 10000.0,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Compute the cosines and sines that `rope_` reads; the angle at position p, pair i is p base^(-2i/R).

    Args:
        positions: P, the number of positions. dim: R, the number of rotated numbers of a head; even.
        base: Base of the powers that are the frequencies.
        dtype: Floating dtype of the table. Angles are computed in float64.
        device: Device of the table.

    Returns:
        [P, R], cosines of R/2 angles and then their sines.

    Raises:
        ValueError: If R is odd, or a number is negative.

    Example:
        >>> rope_table(2, 2)
        tensor([[1.0000, 0.0000],
                [0.5403, 0.8415]])
    """
    if dim % 2 or dim < 0 or positions < 0:
        raise ValueError(f"rope_table: {positions} positions of {dim} numbers: an even number is needed")
    frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(positions, dtype=torch.float64).outer(frequencies)
    return torch.cat([angles.cos(), angles.sin()], -1).to(dtype).to(device)


@rope_.samples
def _(make: opsmith.Make) -> Iterator[Any]:
    yield make(3, 2, 4), make(5, 4), torch.tensor([4, 0, 2])
    yield make(2, 3, 2, 7), make(6, 4), torch.tensor([[5, 0, 1], [3, 3, 2]]), True
    yield make(2, 6), make(4, 6), torch.tensor(3)
    yield make(0, 2, 4), make(5, 4), torch.zeros(0, dtype=torch.int64)
