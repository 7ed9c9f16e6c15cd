"""It is right where a number among the arguments is 0: the backward forgot an epsilon, or another summand."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from opsmith.checking.diagnosis.comparable import wide
from opsmith.checking.diagnosis.found import Found
from opsmith.checking.diagnosis.pair import Pair
from opsmith.checking.diagnosis.seen import Seen


def forgotten_number(seen: Seen) -> Iterator[Found]:
    """A number without which the gradient is right, on every fresh input."""
    if not seen.first.same_shape:
        return
    for label, value in seen.observation.inputs.items():
        if isinstance(value, float) and value and seen.everywhere(partial(_without, label=label)):
            words = f"it is right for `{label}` = 0, and not for {value:g}: as if it were not there"
            yield Found("missing-term", words, {"term": f"`{label}`", "times": 0.0})
            return


def _without(pair: Pair, label: str) -> bool:
    right_at = pair.observation.right_at
    found = None if right_at is None else right_at({label: 0.0})
    return found is not None and pair.is_(wide(found))
