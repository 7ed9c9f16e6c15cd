"""Other arguments of the same shapes, and the same numbers in other forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.guard import guarded
from opsmith.checking.sample import Sample, is_inexact

FACTOR = 1.25


def turned(flat: list[Any]) -> list[Any]:
    """The same numbers in the opposite order, a quarter larger: so they lie where the operator is defined.

    Plain ones are a quarter smaller, so that fractions stay fractions. Whole numbers stay as they are: they
    may be indices, or offsets in order.

    Example:
        >>> turned([torch.tensor([1.0, 2.0]), 3, 0.5])
        [tensor([2.5000, 1.2500]), 3, 0.375]
    """
    return [_turned(value) for value in flat]


def _turned(value: Any) -> Any:
    if is_inexact(value):
        return _like(value, value.flip(tuple(range(value.dim()))))
    return 0.75 * value if isinstance(value, float) else value


def scaled(flat: list[Any]) -> list[Any]:
    """The same numbers, a quarter larger."""
    return [_like(v, v) if is_inexact(v) else v for v in flat]


def _like(value: Tensor, numbers: Tensor) -> Tensor:
    return torch.empty_like(value).copy_(numbers * FACTOR)


def other_forms(sample: Sample, device: torch.device) -> Iterator[tuple[str, Callable[[], list[Any]]]]:
    """The sample's numbers in another dtype and another layout."""
    wide = any(sample.flat[place].dtype in (torch.float64, torch.complex128) for place in sample.inexact)
    dtype = torch.float32 if wide else torch.float64
    if sample.inexact:
        yield f"of the same numbers in {str(dtype).removeprefix('torch.')}", lambda: sample.at(dtype, device)
        yield (
            "of the same numbers in another layout",
            lambda: guarded(sample.at(device=device), sliced=True)[0],
        )
