"""Fresh arguments like those of a sample, within the domain that the sample shows.

The domain of an operator is not declared, so fresh numbers are taken from the range of the given ones:
positive ones stay positive, probabilities stay below 1, indices stay in range, masks keep their two values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.samples.sample import is_inexact, replica
from opsmith.core.generate_like import generate_like

MAX_SCALING = 0.3
"""Largest relative change of a tensor that is scaled as a whole."""


METHODS = ("like", "mixed", "scaled")
"""Methods: `like` draws numbers with the structure of the given ones; `mixed` permutes the given ones and
moves them a little, except zeros and repeated numbers; `scaled` multiplies the given ones by a factor."""


def draw_fresh(flat: Sequence[Any], generator: torch.Generator, method: str = "mixed") -> list[Any]:
    """Draw fresh arguments of the same shapes and dtypes.

    Args:
        flat: Flat arguments.
        generator: Source of random numbers.
        method: One of `METHODS`.

    Example:
        >>> import torch
        >>> (mask,) = draw_fresh([torch.tensor([True, False, False])], torch.Generator().manual_seed(0))
        >>> int(mask.sum())
        1
    """
    if method == "scaled":
        return [_scaled(value, generator) for value in flat]
    return [_drawn(value, generator, method) for value in flat]


def _scaled(value: Any, generator: torch.Generator) -> Any:
    if not is_inexact(value):
        return replica(value)
    return _put(value, _apart(value.detach()) * (1 + MAX_SCALING * float(_uniform((), generator))))


def _drawn(value: Any, generator: torch.Generator, method: str) -> Any:
    if isinstance(value, float) and value:
        return value * (1 + 0.1 * MAX_SCALING * float(_uniform((), generator)))
    if not isinstance(value, Tensor) or not value.numel():
        return replica(value)
    apart = _apart(value.detach())
    numbers = generate_like(apart, apart.shape, generator) if method == "like" else _values(apart, generator)
    fresh = numbers.reshape(apart.shape).to(value.device)
    return _put(value, fresh)


def _put(value: Tensor, numbers: Tensor) -> Tensor:
    """Write numbers into a tensor with the strides of the value."""
    fresh: Tensor = replica(value)
    if not fresh.numel():
        return fresh
    _apart(fresh).copy_(numbers)
    return fresh


def _apart(value: Tensor) -> Tensor:
    """Return the elements with memory of their own: one along each expanded dimension."""
    for dim, stride in enumerate(value.stride()):
        if stride == 0 and value.shape[dim] > 1:
            value = value.narrow(dim, 0, 1)
    return value


def _values(value: Tensor, generator: torch.Generator) -> Tensor:
    plain = value.resolve_conj().resolve_neg().cpu().flatten()
    if plain.is_complex():
        return torch.complex(_between(plain.real, generator), _between(plain.imag, generator))
    if plain.is_floating_point():
        return _between(plain, generator)
    if plain.dtype != torch.bool and plain.numel() > 2 and bool((plain.diff() > 0).all()):
        return plain  # probably offsets, which must stay in order
    return plain[torch.randperm(plain.numel(), generator=generator)]


def _between(values: Tensor, generator: torch.Generator) -> Tensor:
    """Draw numbers in the range of the given ones; repeated numbers stay as frequent as they are."""
    count = values.numel()
    mixed = values[torch.randperm(count, generator=generator)]
    distinct, times = values.unique(return_counts=True)
    if len(distinct) < 3 and count > 2:
        return mixed  # a mask, or one number for all
    if count < 3:
        return mixed * (1 + MAX_SCALING * _uniform((count,), generator).to(values.dtype))
    repeated = distinct[times > 1]
    unchanged = torch.isin(mixed, repeated) | (mixed == 0) | ~mixed.isfinite()
    ordered = values[~torch.isin(values, repeated) & (values != 0) & values.isfinite()].sort().values
    if len(ordered) < 2:
        return mixed
    rank = torch.rand(count, generator=generator, dtype=torch.float64) * (len(ordered) - 1)
    low = rank.long().clamp(max=len(ordered) - 2)
    share = (rank - low).to(values.dtype)
    drawn = ordered[low] * (1 - share) + ordered[low + 1] * share
    return torch.where(unchanged, mixed, drawn)


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw numbers between -1 and 1."""
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
