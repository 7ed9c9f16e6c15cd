"""It is not summed over what was broadcast, or is one part of that sum.

A mean in place of the sum is a factor, of a number that the sizes give: where that is borne out, it is called
`scale`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from opsmith.checking.diagnosis.hypothesis import Found, Pair, Seen

MOST = 64
"""Slices along one dimension that are tried, each on its own."""


def broadcast(seen: Seen) -> Iterator[Found]:
    """The whole of what should be summed; one slice of it; a part of the sum; the mean."""
    about, terms = seen.observation.about, seen.first.terms
    if terms is None:
        return
    if seen.everywhere(lambda pair: pair.terms is not None and pair.is_(pair.terms.values)):
        shape = list(seen.first.mine.shape)
        yield Found("unreduced-broadcast", f"it has the shape {shape}, which `{about}` was broadcast to")
        return
    if seen.everywhere(lambda pair: pair.terms is not None and pair.is_(pair.terms.by_torch())):
        words = (
            f"it is summed over other dimensions than the {_listed(terms.dims)} that `{about}` was broadcast "
            "along: those that autograd sums where it is given a gradient that is not summed"
        )
        yield Found("unreduced-broadcast", words, {"dimensions": list(terms.dims)})
        return
    dims = [dim for dim in terms.dims if terms.values.shape[dim] > 1]
    for dim in dims:
        size = terms.values.shape[dim]
        whole = f"the {size} slices that broadcasting `{about}` along dimension {dim} made"
        for index in [*range(min(size - 1, MOST)), -1]:
            if seen.everywhere(partial(_is_part, dim=dim, kept=slice(index, index + 1 or None))):
                which = {0: "the first", -1: "the last"}.get(index, f"number {index}")
                words = f"it is {which} of {whole}, and not their sum"
                yield Found("unreduced-broadcast", words, {"slice": index, "dimension": dim})
                return
        for kept, left in ((slice(1, None), "first"), (slice(None, -1), "last")):
            if size > 2 and seen.everywhere(partial(_is_part, dim=dim, kept=kept)):
                words = f"it lacks the {left} of {whole} in its sum"
                yield Found("unreduced-broadcast", words, {"left out": left, "dimension": dim})
                return
    for some in dims if len(dims) > 1 else ():
        if seen.everywhere(partial(_is_mean, dim=some)):
            words = f"it is the mean, and not the sum, of what broadcasting along dimension {some} made"
            yield Found("unreduced-broadcast", words, {"dimension": some}, weak=True)
            return
    if seen.everywhere(partial(_is_mean, dim=None)):
        count = terms.count(None)
        words = f"it is the mean, and not the sum, of the {count:.0f} elements that broadcasting made of each"
        yield Found("unreduced-broadcast", words, {"factor": 1 / count}, weak=True)


def _listed(dims: tuple[int, ...]) -> str:
    return f"dimension{'s' * (len(dims) > 1)} {' and '.join(map(str, dims))}"


def _is_part(pair: Pair, dim: int, kept: slice) -> bool:
    """Whether it is the sum over a part of one dimension, and of all others."""
    terms = pair.terms
    return terms is not None and dim in terms.dims and pair.is_(terms.part(dim, kept))


def _is_mean(pair: Pair, dim: int | None) -> bool:
    return pair.terms is not None and pair.is_(pair.right / pair.terms.count(dim))
