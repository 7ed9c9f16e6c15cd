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

import torch
from torch import Tensor

from opsmith.checking.diagnosis.evidence import Detection, Evidence, Pair
from opsmith.checking.diagnosis.observation import Observation
from opsmith.checking.numerics.compare import all_close, in_double, share_of_largest

CLOSE = 1e-12
"""Relative error up to which terms add up to the right gradient."""
MOST_ELEMENTS = 96
"""Largest number of elements of a result that are tested one by one."""


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

    def part(self, dims: Sequence[int], kept: slice) -> Tensor:
        """Sum a slice of the terms along some dimensions, and all along the others."""
        index = [kept if dim in dims else slice(None) for dim in range(self.values.dim())]
        return self.values[tuple(index)].sum(self.dims).reshape(self.shape)

    def by_torch(self) -> Tensor | None:
        """Sum as autograd does for a gradient of that shape; None if it cannot."""
        try:
            return self.values.sum_to_size(self.shape)
        except RuntimeError:  # the shape does not broadcast to it
            return None

    def count(self, dim: int | None) -> float:
        """Count the terms along a dimension, or all."""
        if dim is not None:
            return self.values.shape[dim]
        return self.values.numel() / max(self.shape.numel(), 1)


def terms_of(pair: Pair) -> BroadcastTerms | None:
    """Compute the terms of a right gradient; None where its input was not broadcast."""
    observation = pair.observation
    own = observation.inputs.get(observation.argument or "")
    if not isinstance(own, Tensor) or observation.argument is None or not own.numel():
        return None
    for name, result in observation.results.items():
        if result.numel() <= own.numel() or result.dim() < own.dim():
            continue
        found = _written_out(observation, own, result, pair.expected)
        found = found or _put_together(observation, name, pair.expected)
        if found is not None:
            return found
    return None


def _written_out(
    observation: Observation, own: Tensor, result: Tensor, right: Tensor
) -> BroadcastTerms | None:
    sizes = zip(reversed(own.shape), reversed(result.shape), strict=False)
    if observation.expected_at is None or not all(mine in (1, theirs) for mine, theirs in sizes):
        return None
    found = observation.expected_at(
        {str(observation.argument): own.detach().expand(result.shape).contiguous()}
    )
    if found is None or found.shape != result.shape:
        return None
    ahead = result.dim() - own.dim()
    dims = [dim for dim in range(result.dim()) if dim < ahead or own.shape[dim - ahead] == 1]
    return _confirmed_terms(in_double(found), tuple(dims), right)


def _put_together(observation: Observation, name: str, right: Tensor) -> BroadcastTerms | None:
    grad = observation.grads.get(name)
    if (
        observation.expected_for is None
        or grad is None
        or grad.numel() > MOST_ELEMENTS
        or grad.is_complex()
        or right.is_complex()
    ):
        return None
    values = torch.zeros(grad.numel(), dtype=torch.float64)
    for at in range(grad.numel()):
        given = observation.grads_of_element(name, at, float(grad.flatten()[at]))
        share = in_double(observation.expected_for(given))
        if int(share.count_nonzero()) > 1:
            return None  # not broadcast: it depends on several elements
        values[at] = share.sum()
    dims = range(grad.dim())
    for count in range(1, grad.dim() + 1):
        for some in combinations(dims, count):
            found = _confirmed_terms(values.reshape(grad.shape), some, right)
            if found is not None:
                return found
    return None


def _confirmed_terms(values: Tensor, dims: tuple[int, ...], right: Tensor) -> BroadcastTerms | None:
    """Return the terms, if they add up to the right gradient."""
    if not dims:
        return None
    total = values.sum(dims)
    if total.numel() != right.numel():
        return None
    bound = share_of_largest(CLOSE * values.numel(), values)
    return (
        BroadcastTerms(values, dims, right.shape)
        if all_close(total.reshape(right.shape), right, bound)
        else None
    )


Candidate = Callable[[Pair, BroadcastTerms], Tensor | None]
"""Makes a gradient of the right one, or of its terms."""

MOST_SLICES = 64
"""Largest number of slices along one dimension that are tried one by one."""


def broadcast(evidence: Evidence) -> Iterator[Detection]:
    """Detect a gradient that is not summed over broadcast dimensions, or only in part; or their mean."""
    known = cache(terms_of)
    terms = known(evidence.first)
    if terms is None:
        return

    def predicted(pair: Pair, candidate: Candidate) -> Tensor | None:
        found = known(pair)
        return None if found is None else candidate(pair, found)

    yield from evidence.first_fitting(
        (found, partial(predicted, candidate=each)) for found, each in _candidates(evidence, terms)
    )


def _candidates(evidence: Evidence, terms: BroadcastTerms) -> Iterator[tuple[Detection, Candidate]]:
    """Yield gradients that are made of the right one's terms."""
    made = partial(Detection, "unreduced-broadcast")
    about, shape = evidence.observation.argument, list(evidence.first.got.shape)
    words = f"it has the shape {shape}, which `{about}` was broadcast to"
    yield made(words), lambda pair, terms: terms.values
    words = (
        f"it is summed over other dimensions than the {_listed(terms.dims)} that `{about}` was broadcast "
        "along: those that autograd sums where it is given a gradient that is not summed"
    )
    yield made(words, {"dimensions": list(terms.dims)}), lambda pair, terms: terms.by_torch()
    dims = [dim for dim in terms.dims if terms.values.shape[dim] > 1]
    for dim in dims:
        size = terms.values.shape[dim]
        whole = f"the {size} slices that broadcasting `{about}` along dimension {dim} made"
        for index in [*range(min(size - 1, MOST_SLICES)), -1]:
            which = {0: "the first", -1: "the last"}.get(index, f"number {index}")
            words = f"it is {which} of {whole}, and not their sum"
            yield made(words, {"slice": index, "dimension": dim}), _slice((dim,), index)
        for kept, left in ((slice(1, None), "first"), (slice(None, -1), "last")) if size > 2 else ():
            words = f"it lacks the {left} of {whole} in its sum"
            found = made(words, {"left out": left, "dimension": dim})
            yield found, partial(_part, dims=(dim,), kept=kept)
    for several in [some for count in range(2, len(dims) + 1) for some in combinations(dims, count)]:
        for index, which in ((0, "the first"), (-1, "the last")):
            along = f"broadcasting `{about}` along {_listed(several)}"
            words = f"it is {which} of what {along} made, and not their sum"
            yield made(words, {"slice": index, "dimensions": [*several]}), _slice(several, index)
    for some in dims if len(dims) > 1 else ():
        words = f"it is the mean, and not the sum, of what broadcasting along dimension {some} made"
        yield made(words, {"dimension": some}, weak=True), partial(_mean, dim=some)
    count = terms.count(None)
    words = f"it is the mean, and not the sum, of the {count:.0f} elements that broadcasting made of each"
    yield made(words, {"factor": 1 / count}, weak=True), partial(_mean, dim=None)


def _listed(dims: tuple[int, ...]) -> str:
    return f"dimension{'s' * (len(dims) > 1)} {' and '.join(map(str, dims))}"


def _part(pair: Pair, terms: BroadcastTerms, dims: Sequence[int], kept: slice) -> Tensor | None:
    """Sum over a slice of some dimensions, and over all of the others."""
    return terms.part(dims, kept) if {*dims} <= {*terms.dims} else None


def _slice(dims: Sequence[int], index: int) -> Candidate:
    return partial(_part, dims=dims, kept=slice(index, index + 1 or None))


def _mean(pair: Pair, terms: BroadcastTerms, dim: int | None) -> Tensor:
    return pair.expected / terms.count(dim)
