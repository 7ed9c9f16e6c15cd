"""Tensors of random numbers in the layouts that a kernel must take, by shape and dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def transposed(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    order = tuple(reversed(range(len(shape))))
    return contiguous(tuple(shape[at] for at in order), dtype).permute(order)


def strided(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.stack([contiguous(shape, dtype), contiguous(shape, dtype)], -1)[..., 1]


def of_a_wider_row(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return contiguous((*shape[:-1], shape[-1] + 5), dtype)[..., 2:-3]


def expanded(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return contiguous((1,) * (len(shape) - 1) + shape[-1:], dtype).expand(shape)
