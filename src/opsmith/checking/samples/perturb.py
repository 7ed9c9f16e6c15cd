"""Perturbed values: moved by a small relative step, reversed or scaled, or in another dtype and layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.samples.sample import Sample, is_inexact
from opsmith.checking.side_effects.canaries import guarded


def perturbed(value: Any, step: float, generator: torch.Generator) -> Any:
    """Move each number of a tensor up or down by a relative step; return any other value as it is.

    The move is computed in float64 and rounded once: a step below the eps of the dtype moves few numbers, and
    one above it moves all.

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


FACTOR = 1.25
"""Factor on changed numbers."""


def reversed_numbers(flat: list[Any]) -> list[Any]:
    """Reverse the order of the numbers and enlarge them by a quarter, to stay in the operator's domain.

    Python floats shrink by a quarter, so that fractions stay fractions. Whole numbers stay as they are: they
    may be indices or offsets.

    Example:
        >>> reversed_numbers([torch.tensor([1.0, 2.0]), 3, 0.5])
        [tensor([2.5000, 1.2500]), 3, 0.375]
    """
    return [_turned(value) for value in flat]


def _turned(value: Any) -> Any:
    if is_inexact(value):
        return _like(value, value.flip(tuple(range(value.dim()))))
    return 0.75 * value if isinstance(value, float) else value


def scaled(flat: list[Any]) -> list[Any]:
    """Enlarge the numbers by a quarter."""
    return [_like(v, v) if is_inexact(v) else v for v in flat]


PAIRS = 16
"""Largest number of pairs of numbers that are tried."""


def exchanged(at: int, flat: list[Any]) -> list[Any]:
    """Exchange two different numbers of one tensor, so that its first and last numbers, and the sum, stay.

    Few numbers leave no such pair: then an end or the rounding of the sum may change, or all are enlarged.

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
    changed = _like(value, value) if found is None else torch.empty_like(value).copy_(found.view_as(value))
    return [*flat[:at], changed, *flat[at + 1 :]]


def _like(value: Tensor, numbers: Tensor) -> Tensor:
    return torch.empty_like(value).copy_(numbers * FACTOR)


def other_forms(
    sample: Sample, device: torch.device
) -> Iterator[tuple[str, Callable[[list[Any]], list[Any]]]]:
    """Yield changes of a sample's arguments: the same numbers in another dtype, and in another layout."""
    wide = any(sample.flat[argnum].dtype in (torch.float64, torch.complex128) for argnum in sample.inexact)
    dtype = torch.float32 if wide else torch.float64
    if sample.inexact:
        yield (
            f"of the same numbers in {str(dtype).removeprefix('torch.')}",
            lambda flat: sample.at(dtype, device),
        )
        yield ("of the same numbers in another layout", lambda flat: guarded(flat, sliced=True)[0])
