"""There is no gradient: None, or zeros."""

from __future__ import annotations

from collections.abc import Iterator

from opsmith.checking.diagnosis.comparable import peak
from opsmith.checking.diagnosis.found import Found
from opsmith.checking.diagnosis.pair import Pair
from opsmith.checking.diagnosis.seen import Seen


def missing(seen: Seen) -> Iterator[Found]:
    """Nothing, or zeros everywhere, on every input, where the right one is not zero."""
    if not seen.everywhere(_nothing):
        return
    absent = seen.observation.got is None
    what = "it is None" if absent else "it is zero everywhere"
    size = peak(seen.first.right)
    yield Found("missing-gradient", f"{what}, where the right one goes up to {size:.3g}", {"right": size})


def _nothing(pair: Pair) -> bool:
    return not bool(pair.mine.any())
