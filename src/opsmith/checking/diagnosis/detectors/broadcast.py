"""Detect a gradient that is not summed over broadcast dimensions, or only in part.

Where the input aligns with the last dimensions of a result, the terms are the right gradient with respect to
the input expanded to the shape of that result. Otherwise they are computed one element of the result at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.diagnosis.decompositions import NAMED
from opsmith.checking.diagnosis.evidence import Detection, Evidence
from opsmith.checking.diagnosis.observation import Observation
from opsmith.judging.compare import all_close, share_of_largest


@dataclass(frozen=True)
class BroadcastTerms:
    """Terms of the gradient of a broadcast input.

    Args:
        values: Terms, in the shape of the result.
        dims: Dimensions that are summed over.
        shape: Shape of the sum.
    """

    values: Tensor
    dims: tuple[int, ...]
    shape: torch.Size

    def part(self, dims: Sequence[int], kept: slice) -> Tensor | None:
        """Sum a slice of the terms along some dimensions, and all along the others."""
        if not {*dims} <= {*self.dims}:
            return None
        index = [kept if dim in dims else slice(None) for dim in range(self.values.dim())]
        return self.values[tuple(index)].sum(self.dims).reshape(self.shape)

    def by_torch(self) -> Tensor | None:
        """Sum as autograd does for a gradient of that shape; None if it cannot."""
        try:
            return self.values.sum_to_size(self.shape)
        except RuntimeError:  # the shape does not broadcast to it
            return None


def _terms(pair: Observation) -> BroadcastTerms | None:
    """Compute the terms of a right gradient, as they add up to it; None where its input was not broadcast."""
    right = pair.expected
    if not isinstance(pair.own, Tensor) or not pair.own.numel():
        return None
    for name, result in pair.results.items():
        if result.numel() <= pair.own.numel() or result.dim() < pair.own.dim():
            continue
        for make in (_written_out, _put_together):
            values = make(pair, name)
            for dims in _sets(range(result.dim())):
                if values is None:
                    break
                total, bound = values.sum(dims), share_of_largest(NAMED, values)
                if total.numel() == right.numel() and all_close(total.reshape(right.shape), right, bound):
                    return BroadcastTerms(values, dims, right.shape)
    return None


def _written_out(pair: Observation, name: str) -> Tensor | None:
    own, shape = pair.own, pair.results[name].shape
    if not all(mine in (1, size) for mine, size in zip(reversed(own.shape), reversed(shape), strict=False)):
        return None
    found = pair.right_for(inputs={str(pair.argument): own.detach().expand(shape).contiguous()})
    return None if found is None or found.shape != shape else found


def _put_together(pair: Observation, name: str) -> Tensor | None:
    parts = pair.parts(name)
    if parts is None or bool((parts.flatten(1).count_nonzero(1) > 1).any()):
        return None  # not broadcast: it depends on several elements
    return parts.flatten(1).sum(1).reshape(pair.results[name].shape)


def _sets(dims: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the sets of some dimensions, small ones first."""
    return chain.from_iterable(combinations(dims, count) for count in range(1, len(dims) + 1))


def broadcast(evidence: Evidence) -> Iterator[Detection]:
    """Detect a gradient that is not summed over broadcast dimensions, or only in part."""
    known, about = cache(_terms), f"`{evidence.first.argument}`"
    terms = known(evidence.first)
    if terms is None:
        return

    def made(words: str, make: Callable[[BroadcastTerms], Tensor | None], **measured: Any) -> Detection:
        def predicted(pair: Observation) -> Tensor | None:
            found = known(pair)
            return None if found is None else make(found)

        return Detection("unreduced-broadcast", words, measured, predicted=predicted)

    yield made(
        f"it is summed over other dimensions than the {_listed(terms.dims)} that {about} was broadcast "
        "along: those that autograd sums where it is given a gradient that is not summed",
        BroadcastTerms.by_torch,
        dimensions=[*terms.dims],
    )
    for some in _sets([dim for dim in terms.dims if terms.values.shape[dim] > 1]):
        size, alone = terms.values.shape[some[0]], len(some) == 1
        whole = f"the {size} slices that" if alone else "what"
        whole = f"{whole} broadcasting {about} along {_listed(some)} made"
        for index, which in ((0, "the first"), (-1, "the last")):
            part = partial(BroadcastTerms.part, dims=some, kept=slice(index, index + 1 or None))
            yield made(f"it is {which} of {whole}, and not their sum", part, slice=index, dimensions=[*some])
        for kept, left in (
            ((slice(1, None), "first"), (slice(None, -1), "last")) if alone and size > 2 else ()
        ):
            part = partial(BroadcastTerms.part, dims=some, kept=kept)
            yield made(f"it lacks the {left} of {whole} in its sum", part, left_out=left, dimensions=[*some])


def _listed(dims: Sequence[int]) -> str:
    return f"dimension{'s' * (len(dims) > 1)} {' and '.join(map(str, dims))}"
