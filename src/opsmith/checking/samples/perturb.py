"""New numbers for a sample: moved a little, reversed, scaled, drawn again, or in another dtype or layout.

The domain of an operator is not declared, so fresh numbers are taken from the range of the given numbers:
positive numbers stay positive, probabilities stay below 1, indices stay in range, masks keep their two
values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.samples.sample import Sample
from opsmith.checking.side_effects.canaries import guarded
from opsmith.core.generate_like import generate_like
from opsmith.judging.tensors import is_inexact, replica

FACTOR = 1.25
"""Factor on changed numbers."""


def reversed_numbers(flat: list[Any]) -> list[Any]:
    """Reverse the order of the numbers and enlarge them by a quarter, to stay in the operator's domain.

    Python floats shrink by a quarter, so that fractions stay fractions. Integers are not changed, since they
    may be indices or offsets.

    Example:
        >>> reversed_numbers([torch.tensor([1.0, 2.0]), 3, 0.5])
        [tensor([2.5000, 1.2500]), 3, 0.375]
    """
    turned = [value.flip(tuple(range(value.dim()))) if is_inexact(value) else value for value in flat]
    return scaled([0.75 * value if isinstance(value, float) else value for value in turned])


def scaled(flat: list[Any]) -> list[Any]:
    """Enlarge the numbers by a quarter."""
    return [torch.empty_like(v).copy_(v * FACTOR) if is_inexact(v) else v for v in flat]


PAIRS = 16
"""Maximum number of pairs of numbers that are tried."""


def exchanged(at: int, flat: list[Any]) -> list[Any]:
    """Exchange two different numbers of one tensor, but keep its first and last numbers and its sum.

    Few numbers may have no such pair; then an end or the rounding of the sum changes, or all are enlarged.

    Example:
        >>> exchanged(0, [torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])])
        [tensor([1., 2., 4., 3., 5.])]
    """
    value = flat[at]
    numbers = value.reshape(-1)
    last = numbers.numel() - 1
    inner = [(left, left + 1) for left in range(last - 2, 0, -1)[:PAIRS]]
    found = None
    for left, right in [*inner, *([(last - 1, last)] if last > 0 else [])]:
        turned = numbers.clone()
        turned[left], turned[right] = numbers[right], numbers[left]
        if not torch.equal(turned, numbers):
            found = turned if found is None else found
            if torch.equal(turned.sum(), numbers.sum()):
                found = turned
                break
    (enlarged,) = scaled([value])
    changed = enlarged if found is None else torch.empty_like(value).copy_(found.view_as(value))
    return [*flat[:at], changed, *flat[at + 1 :]]


def other_forms(
    sample: Sample, device: torch.device
) -> Iterator[tuple[str, Callable[[list[Any]], list[Any]]]]:
    """Yield changes of a sample's arguments: the same numbers in a different dtype and layout."""
    wide = any(sample.flat[argnum].dtype in (torch.float64, torch.complex128) for argnum in sample.inexact)
    dtype = torch.float32 if wide else torch.float64
    if sample.inexact:
        yield (
            f"of the same numbers in {str(dtype).removeprefix('torch.')}",
            lambda flat: sample.at(dtype, device),
        )
        yield ("of the same numbers in another layout", lambda flat: guarded(flat, sliced=True)[0])


MAX_SCALING = 0.3
"""Maximum relative change of a tensor that is scaled as a whole."""


def draw_fresh(flat: Sequence[Any], generator: torch.Generator, method: str = "mixed") -> list[Any]:
    """Draw fresh arguments of the same shapes, dtypes and strides.

    Args:
        method: A method of `METHODS`.

    Example:
        >>> import torch
        >>> (mask,) = draw_fresh([torch.tensor([True, False, False])], torch.Generator().manual_seed(0))
        >>> int(mask.sum())
        1
    """
    return [_fresh(value, generator, method) for value in flat]


def _fresh(value: Any, generator: torch.Generator, method: str) -> Any:
    fresh = replica(value)
    if method == "scaled" and not is_inexact(value):
        return fresh
    if isinstance(value, float) and value:
        return value * (1 + 0.1 * MAX_SCALING * float(_uniform((), generator)))
    if isinstance(value, Tensor) and value.numel():
        own = _apart(value.detach())
        _apart(fresh).copy_(_DRAWERS[method](own, generator).reshape(own.shape))
    return fresh


def _apart(value: Tensor) -> Tensor:
    """Return the elements with memory of their own: one element along each expanded dimension."""
    for dim, stride in enumerate(value.stride()):
        if stride == 0 and value.shape[dim] > 1:
            value = value.narrow(dim, 0, 1)
    return value


def _mixed(value: Tensor, generator: torch.Generator) -> Tensor:
    plain = value.resolve_conj().resolve_neg().cpu().flatten()
    if plain.is_complex():
        return torch.complex(_between(plain.real, generator), _between(plain.imag, generator))
    if plain.is_floating_point():
        return _between(plain, generator)
    if plain.dtype != torch.bool and plain.numel() > 2 and bool((plain.diff() > 0).all()):
        return plain  # probably offsets, which must stay in order
    return plain[torch.randperm(plain.numel(), generator=generator)]


def _between(values: Tensor, generator: torch.Generator) -> Tensor:
    """Draw numbers in the range of the given numbers; repeated numbers stay equally frequent."""
    count = values.numel()
    mixed = values[torch.randperm(count, generator=generator)]
    distinct, times = values.unique(return_counts=True)
    if len(distinct) < 3 and count > 2:
        return mixed  # a mask, or the same number everywhere
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


_DRAWERS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "like": lambda value, generator: generate_like(value, value.shape, generator),
    "mixed": _mixed,
    "scaled": lambda value, generator: value * (1 + MAX_SCALING * float(_uniform((), generator))),
}
METHODS = (*_DRAWERS,)
"""Methods: `like` draws numbers with the structure of the given numbers; `mixed` permutes the given numbers
and moves them a little, except zeros and repeated numbers; `scaled` multiplies them by a factor."""
