"""Detect a gradient that is not summed over broadcast dimensions, or only in part.

Where the input aligns with the last dimensions of a result, the terms are the right gradient with respect to
the input expanded to the shape of that result. Otherwise they are computed one element of the result at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.diagnosis.decompositions import NAMED
from opsmith.checking.diagnosis.evidence import Detection, Evidence
from opsmith.checking.diagnosis.observation import Observation
from opsmith.judging.compare import all_close, share_of_largest

MOST_ELEMENTS = 96
"""Largest number of elements of a result that are tested one by one."""
MOST_SLICES = 64
"""Largest number of slices along one dimension that are tried one by one."""


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

    def mean(self, dim: int | None) -> Tensor:
        """Divide the sum by the number of terms along a dimension, or of all."""
        total = self.values.sum(self.dims).reshape(self.shape)
        return total / (self.count if dim is None else self.values.shape[dim])

    @property
    def count(self) -> float:
        """Number of terms of each element."""
        return self.values.numel() / max(self.shape.numel(), 1)


def _terms(pair: Observation) -> BroadcastTerms | None:
    """Compute the terms of a right gradient; None where its input was not broadcast."""
    if not isinstance(pair.own, Tensor) or not pair.own.numel():
        return None
    for name, result in pair.results.items():
        if result.numel() > pair.own.numel() and result.dim() >= pair.own.dim():
            found = _written_out(pair, result) or _put_together(pair, name)
            if found is not None:
                return found
    return None


def _written_out(pair: Observation, result: Tensor) -> BroadcastTerms | None:
    own = pair.own
    sizes = zip(reversed(own.shape), reversed(result.shape), strict=False)
    if not all(mine in (1, theirs) for mine, theirs in sizes):
        return None
    found = pair.with_inputs({str(pair.argument): own.detach().expand(result.shape).contiguous()})
    if found is None or found.shape != result.shape:
        return None
    ahead = result.dim() - own.dim()
    dims = [dim for dim in range(result.dim()) if dim < ahead or own.shape[dim - ahead] == 1]
    return _confirmed(found, tuple(dims), pair.expected)


def _put_together(pair: Observation, name: str) -> BroadcastTerms | None:
    grad = pair.grads.get(name)
    if grad is None or grad.numel() > MOST_ELEMENTS or grad.is_complex() or pair.expected.is_complex():
        return None
    values = torch.zeros(grad.numel(), dtype=torch.float64)
    for at in range(grad.numel()):
        share = pair.right_for(pair.grads_of_element(name, at, float(grad.flatten()[at])))
        if share is None or int(share.count_nonzero()) > 1:
            return None  # not broadcast: it depends on several elements
        values[at] = share.sum()
    for count in range(1, grad.dim() + 1):
        for some in combinations(range(grad.dim()), count):
            found = _confirmed(values.reshape(grad.shape), some, pair.expected)
            if found is not None:
                return found
    return None


def _confirmed(values: Tensor, dims: tuple[int, ...], right: Tensor) -> BroadcastTerms | None:
    """Return the terms, if they add up to the right gradient."""
    total = values.sum(dims) if dims else values
    if not dims or total.numel() != right.numel():
        return None
    same = all_close(total.reshape(right.shape), right, share_of_largest(NAMED, values))
    return BroadcastTerms(values, dims, right.shape) if same else None


Make = Callable[[BroadcastTerms], Tensor | None]
"""Makes a gradient of the right one's terms."""


def broadcast(evidence: Evidence) -> Iterator[Detection]:
    """Detect a gradient that is not summed over broadcast dimensions, or only in part; or their mean."""
    known = cache(_terms)
    terms = known(evidence.first)
    if terms is None:
        return

    def made(words: str, make: Make, *, weak: bool = False, **measured: Any) -> Detection:
        def predicted(pair: Observation) -> Tensor | None:
            found = known(pair)
            return None if found is None else make(found)

        return Detection("unreduced-broadcast", words, measured, weak, predicted)

    yield from evidence.first_fitting(_hypotheses(evidence.first, terms, made))


def _hypotheses(
    first: Observation, terms: BroadcastTerms, made: Callable[..., Detection]
) -> Iterator[Detection]:
    about, shape = first.argument, list(first.got.shape)
    yield made(f"it has the shape {shape}, which `{about}` was broadcast to", lambda terms: terms.values)
    yield made(
        f"it is summed over other dimensions than the {_listed(terms.dims)} that `{about}` was broadcast "
        "along: those that autograd sums where it is given a gradient that is not summed",
        BroadcastTerms.by_torch,
        dimensions=list(terms.dims),
    )

    def part(words: str, dims: Sequence[int], kept: slice, **measured: Any) -> Detection:
        return made(words, partial(BroadcastTerms.part, dims=dims, kept=kept), **measured)

    dims = [dim for dim in terms.dims if terms.values.shape[dim] > 1]
    for dim in dims:
        size = terms.values.shape[dim]
        whole = f"the {size} slices that broadcasting `{about}` along dimension {dim} made"
        for index in [*range(min(size - 1, MOST_SLICES)), -1]:
            which = {0: "the first", -1: "the last"}.get(index, f"number {index}")
            words, kept = f"it is {which} of {whole}, and not their sum", slice(index, index + 1 or None)
            yield part(words, (dim,), kept, slice=index, dimension=dim)
        for kept, left in ((slice(1, None), "first"), (slice(None, -1), "last")) if size > 2 else ():
            words = f"it lacks the {left} of {whole} in its sum"
            yield part(words, (dim,), kept, **{"left out": left, "dimension": dim})
    for several in [some for count in range(2, len(dims) + 1) for some in combinations(dims, count)]:
        for index, which in ((0, "the first"), (-1, "the last")):
            along = f"broadcasting `{about}` along {_listed(several)}"
            words, kept = (
                f"it is {which} of what {along} made, and not their sum",
                slice(index, index + 1 or None),
            )
            yield part(words, several, kept, slice=index, dimensions=[*several])
    for some in dims if len(dims) > 1 else ():
        words = f"it is the mean, and not the sum, of what broadcasting along dimension {some} made"
        yield made(words, partial(BroadcastTerms.mean, dim=some), weak=True, dimension=some)
    words = (
        f"it is the mean, and not the sum, of the {terms.count:.0f} elements that broadcasting made of each"
    )
    yield made(words, partial(BroadcastTerms.mean, dim=None), weak=True, factor=1 / terms.count)


def _listed(dims: Sequence[int]) -> str:
    return f"dimension{'s' * (len(dims) > 1)} {' and '.join(map(str, dims))}"
