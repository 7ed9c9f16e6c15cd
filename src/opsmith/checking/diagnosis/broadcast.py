"""It is not summed over what was broadcast, or is one part of that sum.

The right gradient before that sum is the gradient by the input written out to the shape of the result: what
the reference gives for the same numbers, expanded.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from opsmith.checking.diagnosis.found import Found
from opsmith.checking.diagnosis.pair import Pair
from opsmith.checking.diagnosis.seen import Seen

MOST = 64
"""Slices along one dimension that are tried, each on its own."""

HALF = 2
"""A mean of so many may as well be a factor of 1/2."""


def broadcast(seen: Seen) -> Iterator[Found]:
    """The whole of what should be summed; one slice of it; a part of the sum; the mean."""
    about, terms = seen.observation.about, seen.first.terms
    if terms is None:
        return
    if seen.everywhere(lambda pair: pair.terms is not None and pair.is_(pair.terms)):
        shape = list(seen.first.mine.shape)
        yield Found("unreduced-broadcast", f"it has the shape {shape}, which `{about}` was broadcast to")
        return
    dims = summed(seen.first.right, terms)
    for dim in dims:
        whole = f"the {terms.shape[dim]} slices that broadcasting `{about}` along dimension {dim} made"
        for index in [*range(min(terms.shape[dim] - 1, MOST)), -1]:
            if seen.everywhere(partial(_is_part, dim=dim, kept=slice(index, index + 1 or None))):
                which = {0: "the first", -1: "the last"}.get(index, f"number {index}")
                words = f"it is {which} of {whole}, and not their sum"
                yield Found("unreduced-broadcast", words, {"slice": index, "dimension": dim})
                return
        for kept, left in ((slice(1, None), "first"), (slice(None, -1), "last")):
            if terms.shape[dim] > 2 and seen.everywhere(partial(_is_part, dim=dim, kept=kept)):
                words = f"it lacks the {left} of {whole} in its sum"
                yield Found("unreduced-broadcast", words, {"left out": left, "dimension": dim})
                return
        if len(dims) > 1 and seen.everywhere(partial(_is_mean, dim=dim)) and _telling(seen, dim):
            words = f"it is the mean, and not the sum, of {whole}"
            yield Found("unreduced-broadcast", words, {"dimension": dim})
            return
    if seen.everywhere(partial(_is_mean, dim=None)) and _telling(seen, None):
        count = _count(seen.first, None)
        words = f"it is the mean, and not the sum, of the {count:.0f} elements that broadcasting made of each"
        yield Found("unreduced-broadcast", words, {"factor": 1 / count})


def summed(right: Tensor, terms: Tensor) -> list[int]:
    """The dimensions of the terms that the right one is summed over."""
    ahead = terms.dim() - right.dim()
    return [
        dim
        for dim, size in enumerate(terms.shape)
        if size > 1 and (dim < ahead or right.shape[dim - ahead] == 1)
    ]


def _is_part(pair: Pair, dim: int, kept: slice) -> bool:
    """Whether it is the sum over a part of one dimension, and of all others."""
    terms = pair.terms
    if terms is None or terms.dim() <= dim:
        return False
    index = [slice(None)] * terms.dim()
    index[dim] = kept
    part = terms[tuple(index)].sum(dim, keepdim=True)
    return pair.is_(part.sum_to_size(pair.right.shape))


def _is_mean(pair: Pair, dim: int | None) -> bool:
    return pair.terms is not None and pair.is_(pair.right / _count(pair, dim))


def _count(pair: Pair, dim: int | None) -> float:
    """How many terms are summed along a dimension, or in all."""
    assert pair.terms is not None
    return pair.terms.shape[dim] if dim is not None else pair.terms.numel() / max(pair.right.numel(), 1)


def _telling(seen: Seen, dim: int | None) -> bool:
    """Whether a mean is told from a factor: at other sizes it is one too, of another number of terms."""
    count = _count(seen.first, dim)
    others = [pair for pair in seen.elsewhere if pair.terms is not None and pair.same_shape]
    others = [pair for pair in others if dim is None or pair.terms.dim() > dim]  # type: ignore[union-attr]
    if not all(_is_mean(pair, dim) for pair in others):
        return False
    return count > HALF or any(_count(pair, dim) != count for pair in others)
