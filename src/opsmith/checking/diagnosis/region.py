"""It is right but for some indices, or where a condition holds."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from opsmith.checking.diagnosis.factors import shown_factor
from opsmith.checking.diagnosis.found import Found
from opsmith.checking.diagnosis.seen import Seen
from opsmith.checking.diagnosis.where import where_it_is


def region(seen: Seen) -> Iterator[Found]:
    """The wrong elements of every input by their indices or by a condition, and what stands there."""
    if not seen.first.same_shape or seen.first.right.dim() == 0:
        return
    wrong = seen.first.wrong
    if not bool(wrong.any()) or not any(bool((~pair.wrong & (pair.right != 0)).any()) for pair in seen.pairs):
        return
    place = where_it_is(seen, lambda pair: pair.wrong)
    if place is None:
        return
    what = inside(seen)
    reason = f"it is wrong {place}, and nowhere else" + (f"; {what}" if what else "")
    yield Found("region", reason, {"region": place})


def inside(seen: Seen) -> str:
    """What stands in the wrong elements; empty if it is nothing that has a name."""
    mine = torch.cat([pair.mine[pair.wrong] for pair in seen.pairs])
    right = torch.cat([pair.right[pair.wrong] for pair in seen.pairs])
    if not bool(mine.isfinite().all()):
        return ""
    slack = float(seen.first.slack.max())
    if not bool(mine.any()):
        return "it is zero there"
    weight = float((right.abs() ** 2).sum())
    if weight and len(mine) > 1:
        factor = complex((right.conj() * mine).sum() / weight)
        if bool(((mine - right * (factor if right.is_complex() else factor.real)).abs() <= slack).all()):
            return f"it is {shown_factor(factor)} times the right one there"
    if len(mine) > 1 and bool(((mine - mine[0]).abs() <= slack).all()):
        return f"it is {mine[0].item():.6g} there"
    if not bool(right.any()):
        return "the right one is zero there"
    return ""
