"""Detect a factor for each index: a mean for a sum over groups, a window.

One factor for all elements is `scale`, and one for a part is `region`; either describes the fault better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from opsmith.checking.diagnosis.detectors.scale import shown_factor
from opsmith.checking.diagnosis.evidence import Detection, Evidence, Pair
from opsmith.core.generate_like import WHOLE

SHOWN = 6
"""Largest number of factors in a message."""

CLOSE = 1e-6
"""Relative precision of a factor."""

FEW = 3
"""In fewer pairs a factor may stay the same by chance."""


def per_index_scale(evidence: Evidence) -> Iterator[Detection]:
    """Detect factors equal to the number of occurrences of an index, or constant on fresh inputs."""
    first = evidence.first
    if not first.same_shape or first.expected.is_complex() or first.expected.numel() < 2:
        return
    if not all(bool((pair.got.isfinite() & pair.expected.isfinite()).all()) for pair in evidence.pairs):
        return
    for detector in (_of_groups, _steady):
        for each in detector(evidence):
            yield each
            return


def _steady(evidence: Evidence) -> Iterator[Detection]:
    """Detect factors by position alone, the same on every fresh input."""
    rights, mines = (
        torch.stack([getattr(pair, side) for pair in evidence.pairs]) for side in ("expected", "got")
    )
    nothing = (rights == 0).all(0)
    known = (rights != 0).sum(0) >= FEW
    if not bool((known | nothing).all()):
        return
    factors = _fitted(rights, mines)
    if not _varied(factors[known]) or not _times(evidence, factors):
        return
    words = f"it is the right one times a factor of its own for each element: {_listed(factors)}"
    for dim in range(factors.dim()) if factors.dim() > 1 else ():
        others = tuple(other for other in range(factors.dim()) if other != dim)
        alike = _fitted(rights, mines, *others)
        if _times(evidence, alike):
            words = f"it is the right one times a factor for each index of dimension {dim}: {_listed(alike)}"
            break
    other = factors[known & ((factors - 1).abs() > CLOSE)]
    part = not _varied(other) or 2 * len(other) <= int(known.sum())  # `region` describes a wrong part better
    yield Detection("scale", f"{words}; the same on fresh inputs", {"factors": factors.tolist()}, weak=part)


def _times(evidence: Evidence, factors: Tensor) -> bool:
    return evidence.everywhere(lambda pair: pair.equals(pair.expected * factors))


def _fitted(rights: Tensor, mines: Tensor, *dims: int) -> Tensor:
    """Fit the factors between stacked tensors, each constant along some of their dimensions."""
    over = (0, *(dim + 1 for dim in dims))
    weight = (rights * rights).sum(over, keepdim=True)[0]
    return torch.where(weight > 0, (rights * mines).sum(over, keepdim=True)[0] / weight, 1.0)


def _varied(factors: Tensor) -> bool:
    """Return True if there is more than one factor."""
    low, high = (float(each) for each in factors.aminmax()) if factors.numel() else (1.0, 1.0)
    return not math.isclose(low, high, rel_tol=CLOSE)


def _listed(factors: Tensor) -> str:
    shown = [shown_factor(each, CLOSE) for each in factors.flatten().tolist()]
    return ", ".join(shown[:SHOWN]) + (", ..." if len(shown) > SHOWN else "")


FORMS = MappingProxyType(
    {
        "1 over how often {}": lambda count: 1 / count,
        "how often {}": lambda count: count,
        "1 over the square root of how often {}": lambda count: count.rsqrt(),
    }
)

Counts = Callable[[Pair], Tensor | None]
"""Occurrences of each index, in the shape of the gradient; None where unknown."""


def _of_groups(evidence: Evidence) -> Iterator[Detection]:
    """Detect a mean over groups instead of a sum, or the reverse."""
    for label, index in evidence.observation.inputs.items():
        if not isinstance(index, Tensor) or index.dtype not in WHOLE:
            continue
        for dim in range(evidence.first.expected.dim()):
            for of, give in (("it", _by_value), (f"its entry of `{label}`", _by_group)):
                for form, take in FORMS.items():
                    counts = partial(give, label=label, dim=dim)
                    if not all(_has(pair, counts, take) for pair in evidence.pairs):
                        continue
                    equals = form.format(f"{of} occurs in `{label}`")
                    words = f"it is the right one times a factor for each index of dimension {dim}: {equals}"
                    yield Detection("scale", words, {"equals": equals})
                    return


def _by_value(pair: Pair, label: str, dim: int) -> Tensor | None:
    """Count each index of a dimension among the values of the input."""
    index, size = _index(pair, label), pair.expected.shape[dim]
    if index is None or int(index.max()) >= size:
        return None
    return _beside(index.bincount(minlength=size), pair, dim, 1)


def _by_group(pair: Pair, label: str, dim: int) -> Tensor | None:
    """Count the group of each element, which the aligned input names."""
    index = _index(pair, label)
    if index is None:
        return None
    shape = pair.observation.inputs[label].shape
    if pair.expected.shape[dim : dim + len(shape)] != shape:
        return None
    return _beside(index.bincount()[index].reshape(shape), pair, dim, len(shape))


def _index(pair: Pair, label: str) -> Tensor | None:
    value = pair.observation.inputs.get(label)
    if not isinstance(value, Tensor) or not value.dim() or not value.numel():
        return None
    index = value.detach().cpu().flatten().long()
    return index if int(index.min()) >= 0 else None


def _beside(counts: Tensor, pair: Pair, dim: int, dims: int) -> Tensor:
    behind = pair.expected.dim() - dim - dims
    return counts.clamp_min(1).double().reshape(*counts.shape, *[1] * behind).expand(pair.expected.shape)


def _has(pair: Pair, counts: Counts, take: Callable[[Tensor], Tensor]) -> bool:
    """Return True if these factors, if they differ, explain the gradient."""
    found = counts(pair)
    return (
        found is not None and _varied(found[pair.expected != 0]) and pair.equals(pair.expected * take(found))
    )
