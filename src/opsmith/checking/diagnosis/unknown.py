"""The best description of a difference that no hypothesis explains."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from opsmith.checking.causes import UNKNOWN
from opsmith.checking.diagnosis.found import Found
from opsmith.checking.diagnosis.pair import Pair, peak
from opsmith.checking.diagnosis.seen import Seen
from opsmith.checking.diagnosis.sources import sources

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
    like = f"; it still looks like the right one (correlation {looks:.3f})" if looks > LOOKS else ""
    return Found(UNKNOWN, f"it is wrong {which}, by up to {size:.2g} of the largest element{like}", evidence)


def _patterns(seen: Seen) -> Iterator[str]:
    """Patterns that are no cause of the list, each borne out by every pair."""
    dims = range(seen.first.right.dim())
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
        for words, power in (("once too often", 1.0), ("once too few", -1.0)):
            if seen.everywhere(lambda pair, name=name, power=power: _factor(pair, name, power)):  # type: ignore[misc]
                yield f"it is the right one with the factor {name} {words}"
    if seen.everywhere(_other_order):
        yield "it has the right values in another order"


def _constant_off(pair: Pair) -> bool:
    off = (pair.mine - pair.right).flatten()
    return len(off) > 2 and bool(((off - off[0]).abs() <= pair.slack.max()).all())


def _factor(pair: Pair, name: str, power: float) -> bool:
    """Whether it is the right one times other numbers, or the right one is that of it."""
    lying = next((each for (known, _), each in sources(pair).items() if known == name), None)
    if lying is None or lying.dtype == torch.bool or (lying.is_complex() and not pair.right.is_complex()):
        return False
    if power > 0:
        return pair.is_(pair.right * lying)
    off = (pair.mine * lying - pair.right).abs()
    return bool((off <= pair.slack * (1 + lying.abs())).all())


def _other_order(pair: Pair) -> bool:
    if pair.mine.is_complex() or pair.mine.numel() < 3:
        return False
    mine, right = pair.mine.flatten().sort().values, pair.right.flatten().sort().values
    return bool(((mine - right).abs() <= pair.slack.max()).all())


def _correlation(pair: Pair) -> float:
    sizes = float(pair.mine.abs().pow(2).sum().sqrt() * pair.right.abs().pow(2).sum().sqrt())
    product = float((pair.mine.conj() * pair.right).real.sum())
    return product / sizes if sizes else 0.0
