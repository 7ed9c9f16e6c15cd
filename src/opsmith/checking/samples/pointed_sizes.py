"""Sizes that an integer tensor points into: without rows there are no indices of rows.

A reference may take indices into nothing, as `index_add` does, and a kernel that checks them refuses them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opsmith.checking.exceptions import Overlooking
from opsmith.checking.samples.linked_sizes import Sizes, Symbol
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.core.generate_like import WHOLE


def emptied_with(subject: Subject, sizes: Sizes, symbol: Symbol) -> dict[str, int] | None:
    """Return the sizes that are 0 where one is: those of the indices into it, too; None if they cannot be.

    Args:
        subject: The subject of the check.
        sizes: Sizes of the sample.
        symbol: The size that is to be 0.
    """
    to = {symbol.name: 0}
    for argnum, value in enumerate(sizes.sample.flat):
        if not isinstance(value, Tensor) or value.dtype not in WHOLE or not value.numel():
            continue
        own = [each for each in sizes.symbols if (argnum, False) in _places(each)]
        if any(each.name in to for each in own) or not _points_into(subject, sizes.sample, symbol, argnum):
            continue
        if not own:
            return None
        to[own[0].name] = 0
    return to


def _places(symbol: Symbol) -> set[tuple[int, bool]]:
    return {(each.argnum, bool(each.number)) for each in symbol.locations}


def _points_into(subject: Subject, sample: Sample, symbol: Symbol, argnum: int) -> bool:
    """True if the reference takes the last index of a dimension, and refuses the one behind it."""
    return _takes(subject, sample, argnum, symbol.size - 1) and not _takes(
        subject, sample, argnum, symbol.size
    )


def _takes(subject: Subject, sample: Sample, argnum: int, index: int) -> bool:
    flat = sample.at()
    if index > torch.iinfo(flat[argnum].dtype).max:
        return False
    flat[argnum] = torch.full_like(flat[argnum], index)
    with Overlooking(), torch.no_grad():
        subject.reference(sample, flat)
        return True
    return False
