"""It is nan or infinite where the right one is finite."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from opsmith.checking.diagnosis.found import Found
from opsmith.checking.diagnosis.pair import Pair
from opsmith.checking.diagnosis.seen import Seen
from opsmith.checking.diagnosis.where import where_it_is


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
