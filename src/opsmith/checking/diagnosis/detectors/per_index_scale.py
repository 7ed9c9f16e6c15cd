"""It is the right one times a factor of its own for each index: a mean for a sum over groups, a window.

One factor for all is `scale`, and one for a part is `region`; either says it better where it is borne out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from opsmith.checking.diagnosis.detectors.scale import shown_factor
from opsmith.checking.diagnosis.hypothesis import Found, Pair, Seen
from opsmith.checking.samples.generate_like import WHOLE

SHOWN = 6
"""Factors that a message lists, at most."""

CLOSE = 1e-6
"""To which share of itself a factor is known."""

FEW = 3
"""In fewer pairs it is chance that a factor stays as it is."""


def own_factors(seen: Seen) -> Iterator[Found]:
    """How often an index occurs, or one over that; or factors that stay on every fresh input."""
    first = seen.first
    if not first.same_shape or first.right.is_complex() or first.right.numel() < 2:
        return
    if not all(bool((pair.mine.isfinite() & pair.right.isfinite()).all()) for pair in seen.pairs):
        return
    for hypothesis in (_of_groups, _steady):
        for each in hypothesis(seen):
            yield each
            return


def _steady(seen: Seen) -> Iterator[Found]:
    """Factors by position alone: the same for every number that ever stands there."""
    rights, mines = (torch.stack([getattr(pair, side) for pair in seen.pairs]) for side in ("right", "mine"))
    nothing = (rights == 0).all(0)
    told = (rights != 0).sum(0) >= FEW
    if not bool((told | nothing).all()):
        return
    factors = _fitted(rights, mines)
    if not _varied(factors[told]) or not _times(seen, factors):
        return
    words = f"it is the right one times a factor of its own for each element: {_listed(factors)}"
    for dim in range(factors.dim()) if factors.dim() > 1 else ():
        others = tuple(other for other in range(factors.dim()) if other != dim)
        alike = _fitted(rights, mines, *others)
        if _times(seen, alike):
            words = f"it is the right one times a factor for each index of dimension {dim}: {_listed(alike)}"
            break
    other = factors[told & ((factors - 1).abs() > CLOSE)]
    part = not _varied(other) or 2 * len(other) <= int(told.sum())  # the place of a wrong part says more
    yield Found("scale", f"{words}; the same on fresh inputs", {"factors": factors.tolist()}, weak=part)


def _times(seen: Seen, factors: Tensor) -> bool:
    return seen.everywhere(lambda pair: pair.is_(pair.right * factors))


def _fitted(rights: Tensor, mines: Tensor, *dims: int) -> Tensor:
    """The factors between tensors that are stacked, each the same along some of their dimensions."""
    over = (0, *(dim + 1 for dim in dims))
    weight = (rights * rights).sum(over, keepdim=True)[0]
    return torch.where(weight > 0, (rights * mines).sum(over, keepdim=True)[0] / weight, 1.0)


def _varied(factors: Tensor) -> bool:
    """Whether there is more than one."""
    low, high = (float(each) for each in factors.aminmax()) if factors.numel() else (1.0, 1.0)
    return high - low > CLOSE * max(abs(low), abs(high))


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
"""How often each index occurs, in the shape of what came; None where that cannot be told."""


def _of_groups(seen: Seen) -> Iterator[Found]:
    """What a mean over groups has and a sum has not, or the other way."""
    for label, index in seen.observation.inputs.items():
        if not isinstance(index, Tensor) or index.dtype not in WHOLE:
            continue
        for dim in range(seen.first.right.dim()):
            for of, give in (("it", _by_value), (f"its entry of `{label}`", _by_place)):
                for form, take in FORMS.items():
                    counts = partial(give, label=label, dim=dim)
                    if not all(_has(pair, counts, take) for pair in seen.pairs):
                        continue
                    equals = form.format(f"{of} occurs in `{label}`")
                    words = f"it is the right one times a factor for each index of dimension {dim}: {equals}"
                    yield Found("scale", words, {"equals": equals})
                    return


def _by_value(pair: Pair, label: str, dim: int) -> Tensor | None:
    """Each index of a dimension is one that the input may name."""
    index, size = _index(pair, label), pair.right.shape[dim]
    if index is None or int(index.max()) >= size:
        return None
    return _beside(index.bincount(minlength=size), pair, dim, 1)


def _by_place(pair: Pair, label: str, dim: int) -> Tensor | None:
    """The input lies beside what came, from a dimension on, and names a group for each."""
    index = _index(pair, label)
    if index is None:
        return None
    shape = pair.observation.inputs[label].shape
    if pair.right.shape[dim : dim + len(shape)] != shape:
        return None
    return _beside(index.bincount()[index].reshape(shape), pair, dim, len(shape))


def _index(pair: Pair, label: str) -> Tensor | None:
    value = pair.observation.inputs.get(label)
    if not isinstance(value, Tensor) or not value.dim() or not value.numel():
        return None
    index = value.detach().cpu().flatten().long()
    return index if int(index.min()) >= 0 else None


def _beside(counts: Tensor, pair: Pair, dim: int, dims: int) -> Tensor:
    behind = pair.right.dim() - dim - dims
    return counts.clamp_min(1).double().reshape(*counts.shape, *[1] * behind).expand(pair.right.shape)


def _has(pair: Pair, counts: Counts, take: Callable[[Tensor], Tensor]) -> bool:
    """Whether such factors, of which there is more than one, explain what came."""
    found = counts(pair)
    return found is not None and _varied(found[pair.right != 0]) and pair.is_(pair.right * take(found))
