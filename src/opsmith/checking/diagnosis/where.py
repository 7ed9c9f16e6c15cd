"""Where the elements are that something holds of: by indices or a condition that predict them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opsmith.checking.diagnosis.conditions import PLAIN, Table, chances, conditions, silent
from opsmith.checking.diagnosis.indices import places
from opsmith.checking.diagnosis.pair import Pair
from opsmith.checking.diagnosis.seen import Seen

MOST = 2
"""Descriptions that a message lists, where nothing tells them apart."""

Mask = Callable[[Pair], Tensor]


def where_it_is(seen: Seen, mask: Mask) -> str | None:
    """Words for the elements of a mask, borne out by every pair; None if there are none."""
    return by_index(seen, mask) or by_condition(seen, mask)


def by_index(seen: Seen, mask: Mask) -> str | None:
    """The elements by their indices: the same on every fresh input, and by the same rule at other sizes."""
    masks = [mask(pair) for pair in seen.pairs]
    union = torch.stack(masks).any(0)
    for pair, each in zip(seen.pairs, masks, strict=True):
        if bool((union & ~each & ~silent(pair, each)).any()):
            return None
    total = union.numel()
    if not seen.fresh and chances(total, int(union.sum())) < PLAIN:
        return None
    there = [(pair, mask(pair)) for pair in seen.elsewhere if pair.same_shape]
    kept: list[str] = []
    fallback = None
    for place in places(union):
        if fallback is None or place.words.startswith("at"):
            fallback = place.words
        if place.words.startswith("at") and kept:
            continue  # a list says less than a rule
        if all(_predicts(place.mask(pair.right.shape), found, pair) for pair, found in there):
            kept.append(place.words)
    if kept:
        return " or ".join(kept[:MOST]) if len(kept[0]) + len(kept[-1]) < 80 else kept[0]
    return fallback


def _predicts(predicted: Tensor, found: Tensor, pair: Pair) -> bool:
    extra = predicted & ~found & ~silent(pair, found)
    return not bool((found & ~predicted).any()) and not bool(extra.any())


def by_condition(seen: Seen, mask: Mask) -> str | None:
    """The elements by a condition on the numbers beside them."""
    pairs = [*seen.pairs, *seen.more, *(pair for pair in seen.elsewhere if pair.same_shape)]
    table = Table.of(pairs, mask)
    for found in conditions(table):
        return found.words
    return None
