"""Whether a size may be another although every sample has the same: the reference itself tells.

If running it on a part of a dimension gives that part of its results, each place stands for itself there, as
in a batch, and the size means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opsmith.checking.mistakes import Overlooking
from opsmith.checking.sample import is_inexact
from opsmith.checking.subject import Subject
from opsmith.checking.symbols import Sizes, Symbol


def free(subject: Subject, sizes: Sizes, symbol: Symbol) -> bool:
    """Whether a part of a dimension gives a part of the results, so that its size may be any."""
    if symbol.size < 2 or symbol.doubled or any(spot.number for spot in symbol.spots) or subject.draws:
        return False
    dimensions = {spot.place: spot.index for spot in symbol.spots}
    # Suppressed, since what it raises for a part says that the size does mean something.
    with Overlooking(), torch.no_grad():
        whole = subject.reference(sizes.sample, sizes.sample.at(torch.float64))
        return all(
            _is_part(
                whole,
                subject.reference(
                    sizes.sample, _part(sizes.sample.at(torch.float64), dimensions, start, length)
                ),
                symbol.size,
                start,
                length,
            )
            for start, length in ((0, symbol.size - 1), (symbol.size - 1, 1))
        )
    return False


def _part(flat: list[object], dimensions: dict[int, int], start: int, length: int) -> list[object]:
    return [
        value.narrow(dimensions[place], start, length).clone()
        if isinstance(value, Tensor) and place in dimensions
        else value
        for place, value in enumerate(flat)
    ]


def _is_part(
    whole: Sequence[Tensor | None], part: Sequence[Tensor | None], size: int, start: int, length: int
) -> bool:
    pairs = zip(whole, part, strict=False)
    return len(whole) == len(part) and all(
        _one_is_part(one, other, size, start, length) for one, other in pairs
    )


def _one_is_part(whole: Tensor | None, part: Tensor | None, size: int, start: int, length: int) -> bool:
    if whole is None or part is None:
        return whole is part
    if whole.dim() != part.dim() or whole.dtype != part.dtype:
        return False
    changed = [at for at, (a, b) in enumerate(zip(whole.shape, part.shape, strict=True)) if a != b]
    if len(changed) != 1 or whole.shape[changed[0]] != size:
        return False
    expected = whole.narrow(changed[0], start, length)
    if not is_inexact(whole):
        return torch.equal(expected, part)
    return torch.allclose(expected, part, rtol=1e-9, atol=1e-12, equal_nan=True)
