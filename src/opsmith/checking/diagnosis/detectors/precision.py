"""It is computed in a narrower dtype than its arguments have.

Two things tell rounding from a formula that is a little off: the numbers that come are numbers of the
narrower dtype; or the error is of its size and changes altogether when the inputs move by a few roundings,
while the error of a formula moves as little as its inputs do.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from opsmith.checking.diagnosis.hypothesis import Found, Pair, Seen
from opsmith.checking.diagnosis.region import where_it_is
from opsmith.checking.numerics.compare import peak

NARROWER = (torch.bfloat16, torch.float16, torch.float32)
NUMBERS = 16
"""Numbers that have to be of a narrower dtype before that says something: a whole number is one of any."""

ROUGH = 0.5
"""Share of the error that is another one then."""

MOVED = 4.0
"""By how many roundings of the narrower dtype the inputs move."""

LITTLE = 0.5
"""By how many they move beside that: rounding is nearly as different then, a formula only by so much less."""

LARGEST = 0.125
"""More than this of the largest element is no rounding, of whatever dtype."""


def precision(seen: Seen) -> Iterator[Found]:
    """Every number is one of a narrower dtype; or the error is of its size, and as rough as rounding."""
    got = seen.observation.got
    if got is None or not seen.first.mine.isfinite().all():
        return
    for dtype in NARROWER:
        eps = torch.finfo(dtype).eps
        if eps <= torch.finfo(got.dtype).eps:
            continue
        name = str(dtype).removeprefix("torch.")
        largest = max(_relative(pair) for pair in seen.pairs)
        if largest > min(64 * eps, LARGEST):
            continue
        if seen.everywhere(lambda pair, dtype=dtype: _of(pair, dtype)) and _telling(seen):  # type: ignore[misc]
            words = f"it consists of {name} numbers, so it was computed in {name}"
        elif largest >= eps / 64 and seen.everywhere(_spread) and _rough(seen, eps):
            words = (
                f"it is off like {name} rounding: by {largest:.1g} of its largest element, and by something "
                f"else each time the inputs move by {MOVED * eps:.1g} of themselves"
            )
        else:
            continue
        yield Found("precision", words, {"error": largest, f"eps of {name}": eps})
        return


def _relative(pair: Pair) -> float:
    return peak(pair.error) / (peak(pair.right) or 1.0)


def _of(pair: Pair, dtype: torch.dtype) -> bool:
    parts = torch.view_as_real(pair.mine) if pair.mine.is_complex() else pair.mine
    return torch.equal(parts.to(dtype).to(parts.dtype), parts)


def _telling(seen: Seen) -> bool:
    """Whether there are enough numbers, of which the right ones are none of any narrower dtype."""
    digits = sum(int((pair.right.real.float().double() != pair.right.real).sum()) for pair in seen.pairs)
    return digits >= min(NUMBERS, seen.first.right.numel())


def _spread(pair: Pair) -> bool:
    """Whether most elements are off, as rounding is, and not some of them."""
    return 2 * int((pair.error > 0).sum()) >= int((pair.right != 0).sum())


def _rough(seen: Seen, eps: float) -> bool:
    changes = _changes(seen, MOVED * eps)
    if len(changes) < len(SEEDS) or min(changes) <= ROUGH:
        return False
    less = _changes(seen, LITTLE * eps)
    return max(less, default=0.0) > max(changes) * (2 * LITTLE / MOVED)


SEEDS = (1, 2)


def _changes(seen: Seen, step: float) -> list[float]:
    """How much of the error is another one where the inputs have moved by so much of themselves."""
    near = seen.observation.near
    moved = [] if near is None else [near(step, seed) for seed in SEEDS]
    off = seen.first.mine - seen.first.right
    pairs = [Pair(each) for each in moved if each is not None]
    return [peak((pair.mine - pair.right) - off) / (peak(off) or 1.0) for pair in pairs]


def nonfinite(seen: Seen) -> Iterator[Found]:
    """Elements that are no finite numbers; and where they are, if a condition tells it."""
    bad = _bad(seen.first)
    count = int(bad.sum())
    if not count:
        return
    values = seen.first.mine[bad]
    nans, total = int(values.isnan().sum()), bad.numel()
    kind = "nan" if nans == count else "nan or infinite" if nans else "infinite"
    which = "everywhere" if count == total else f"in {count} of {total} elements"
    place = None if count == total else where_it_is(seen, _bad)
    reason = f"it is {kind} {which}" + (f", {place}" if place else "")
    yield Found("nan", reason, {"elements": f"{count} of {total}", **({"place": place} if place else {})})


def _bad(pair: Pair) -> Tensor:
    return ~pair.mine.isfinite() & pair.right.isfinite()
