"""Fresh arguments like those of a sample: other numbers that the operator takes as well.

Nobody says what an operator's domain is, so fresh numbers are taken from between those that the author gave:
positive ones stay positive, probabilities stay below 1, indices stay in range, masks keep their two values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.samples.generate_like import like
from opsmith.checking.samples.sample import is_inexact, replica

GENTLE = 0.3
"""How much of itself a whole tensor grows or shrinks where its numbers hang together."""


WAYS = ("like", "mixed", "scaled")
"""Ways to draw: numbers such as the given ones, with their structure; the given ones in other places, moved a
little but for zeros and whatever occurs more than once; the given ones where they are, scaled."""


def redrawn(flat: Sequence[Any], generator: torch.Generator, way: str = "mixed") -> list[Any]:
    """Fresh arguments of the same forms.

    Args:
        flat: The arguments.
        generator: Source of what is drawn.
        way: One of `WAYS`.

    Example:
        >>> import torch
        >>> (mask,) = redrawn([torch.tensor([True, False, False])], torch.Generator().manual_seed(0))
        >>> int(mask.sum())
        1
    """
    if way == "scaled":
        return [_scaled(value, generator) for value in flat]
    return [_drawn(value, generator, way) for value in flat]


def _scaled(value: Any, generator: torch.Generator) -> Any:
    if not is_inexact(value):
        return replica(value)
    return _put(value, _apart(value.detach()) * (1 + GENTLE * float(_uniform((), generator))))


def _drawn(value: Any, generator: torch.Generator, way: str) -> Any:
    if isinstance(value, float) and value:
        return value * (1 + 0.1 * GENTLE * float(_uniform((), generator)))
    if not isinstance(value, Tensor) or not value.numel():
        return replica(value)
    apart = _apart(value.detach())
    numbers = like(apart, apart.shape, generator) if way == "like" else _values(apart, generator)
    fresh = numbers.reshape(apart.shape).to(value.device)
    return _put(value, fresh)


def _put(value: Tensor, numbers: Tensor) -> Tensor:
    """Numbers in a tensor that lies as the value does."""
    fresh: Tensor = replica(value)
    if not fresh.numel():
        return fresh
    _apart(fresh).copy_(numbers)
    return fresh


def _apart(value: Tensor) -> Tensor:
    """The elements that lie in places of their own: one along each dimension that was expanded."""
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
        return plain  # offsets, most likely: another order would mean nothing
    return plain[torch.randperm(plain.numel(), generator=generator)]


def _between(values: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers between those that are there; what occurs more than once stays as often as it is there."""
    count = values.numel()
    mixed = values[torch.randperm(count, generator=generator)]
    distinct, times = values.unique(return_counts=True)
    if len(distinct) < 3 and count > 2:
        return mixed  # a mask, or one number for all
    if count < 3:
        return mixed * (1 + GENTLE * _uniform((count,), generator).to(values.dtype))
    repeated = distinct[times > 1]
    kept = torch.isin(mixed, repeated) | (mixed == 0) | ~mixed.isfinite()
    ordered = values[~torch.isin(values, repeated) & (values != 0) & values.isfinite()].sort().values
    if len(ordered) < 2:
        return mixed
    rank = torch.rand(count, generator=generator, dtype=torch.float64) * (len(ordered) - 1)
    low = rank.long().clamp(max=len(ordered) - 2)
    share = (rank - low).to(values.dtype)
    drawn = ordered[low] * (1 - share) + ordered[low + 1] * share
    return torch.where(kept, mixed, drawn)


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Numbers between -1 and 1."""
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
