"""The best description of a difference that no hypothesis explains."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from opsmith.checking.causes import UNKNOWN
from opsmith.checking.diagnosis.conditions import sources
from opsmith.checking.diagnosis.detectors.scale import shown_factor
from opsmith.checking.diagnosis.hypothesis import Found, Pair, Seen
from opsmith.checking.numerics.compare import peak

CLOSE = 1e-6
FEW = 3
LOOKS = 0.9
"""From which correlation on a tensor looks like the right one."""


def unknown(seen: Seen) -> Found:
    """Where the difference is, how large, and what it nearly is."""
    pair = seen.first
    if not pair.same_shape:
        return Found(UNKNOWN, "")
    wrong = pair.wrong
    count, total = int(wrong.sum()), wrong.numel()
    size = peak(pair.error) / (peak(pair.right) or 1.0)
    evidence = {"wrong": f"{count} of {total}", "error": size}
    if pair.near:
        words = f"it is off by {size:.2g} of its largest element, too little to say why"
        return Found(UNKNOWN, words, evidence)
    for words in _patterns(seen):
        return Found(UNKNOWN, words, evidence)
    which = "everywhere" if count == total else f"in {count} of {total} elements"
    looks = _correlation(pair)
    words = f"; it is roughly proportional to the right one (correlation {looks:.3f})"
    like = words if looks > LOOKS else ""
    return Found(
        UNKNOWN, f"it is wrong {which}, by up to {size:.2g} of the largest right element{like}", evidence
    )


def _patterns(seen: Seen) -> Iterator[str]:
    """Patterns that are no cause of the list, each borne out by every pair."""
    dims = range(seen.first.right.dim())
    if seen.observation.about is not None and seen.everywhere(lambda pair: not bool(pair.right.any())):
        yield CONSTANT
        return
    for dim in dims:
        if seen.everywhere(lambda pair, dim=dim: pair.is_(pair.right.flip(dim))):  # type: ignore[misc]
            yield f"it is the right one in the reverse order along dimension {dim}"
    if seen.everywhere(lambda pair: pair.is_(pair.right.flip(tuple(dims)))):
        yield "it is the right one in the reverse order along all dimensions"
    if seen.everywhere(_constant_off):
        off = (seen.first.mine - seen.first.right).flatten()[0].item()
        yield f"it is the right one plus the same number everywhere ({off:.6g})"
    for (name, _), each in sources(seen.first).items():
        if each.dtype == torch.bool:
            continue
        for words, times in (("once too often", True), ("once too few", False)):
            factor = _factor(seen.first, name, times=times)
            if factor is None:
                continue
            if seen.everywhere(partial(_has_factor, name=name, times=times, factor=factor)):
                more = "" if abs(factor - 1) < CLOSE else f", and times {shown_factor(factor)}"
                yield f"it is the right one with the factor {name} {words}{more}"
    if seen.everywhere(_other_order):
        yield "it has the right values in another order"


CONSTANT = (
    "the right one is zero, since the results do not move with the input; where another is meant, as of a "
    'straight-through estimator, say so: `opsmith.adopt(..., kind="surrogate")` of a class, '
    "`.surrogate_gradients(...)` of an operator"
)


def _constant_off(pair: Pair) -> bool:
    off = (pair.mine - pair.right).flatten()
    return len(off) > 2 and bool(((off - off[0]).abs() <= pair.slack.max()).all())


def _sides(pair: Pair, name: str, *, times: bool) -> tuple[Tensor, Tensor] | None:
    """What came, and the right one, of which one has been multiplied by other numbers."""
    lying = next((each for (known, _), each in sources(pair).items() if known == name), None)
    if lying is None or lying.dtype == torch.bool or (lying.is_complex() and not pair.right.is_complex()):
        return None
    return (pair.mine, pair.right * lying) if times else (pair.mine * lying, pair.right)


def _factor(pair: Pair, name: str, *, times: bool) -> float | None:
    """By which one is the other, but for those numbers."""
    sides = _sides(pair, name, times=times)
    if sides is None or not bool(sides[1].any()):
        return None
    factor = complex((sides[1].conj() * sides[0]).sum() / (sides[1].abs() ** 2).sum())
    return factor.real if factor.real and abs(factor.imag) <= CLOSE * abs(factor) else None


def _has_factor(pair: Pair, name: str, *, times: bool, factor: float) -> bool:
    sides = _sides(pair, name, times=times)
    if sides is None or pair.right.numel() < FEW:
        return False
    return peak(sides[0] - factor * sides[1]) <= CLOSE * max(peak(sides[0]), peak(sides[1]))


def _other_order(pair: Pair) -> bool:
    if pair.mine.is_complex() or pair.mine.numel() < 3:
        return False
    mine, right = pair.mine.flatten().sort().values, pair.right.flatten().sort().values
    return bool(((mine - right).abs() <= pair.slack.max()).all())


def _correlation(pair: Pair) -> float:
    sizes = float(pair.mine.abs().pow(2).sum().sqrt() * pair.right.abs().pow(2).sum().sqrt())
    product = float((pair.mine.conj() * pair.right).real.sum())
    return product / sizes if sizes else 0.0
