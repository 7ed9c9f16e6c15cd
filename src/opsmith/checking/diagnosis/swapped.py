"""It is the gradient of another input, or that of other inputs in their places."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

from torch import Tensor

from opsmith.checking.diagnosis.comparable import wide
from opsmith.checking.diagnosis.found import Found
from opsmith.checking.diagnosis.pair import Pair
from opsmith.checking.diagnosis.seen import Seen

MOST = 15
"""Pairs of arguments that are tried in each other's places."""


def swapped(seen: Seen) -> Iterator[Found]:
    """What is right for another input, or if two inputs or two incoming gradients change places."""
    others = seen.observation.others
    if others is not None:
        for label, (_, right) in others().items():
            if right.shape != seen.first.mine.shape:
                continue
            if seen.everywhere(partial(_is_of, label=label)):
                back = seen.everywhere(partial(_has_mine, label=label))
                mine = seen.observation.about
                more = f", and that of `{label}` is the right one of `{mine}`" if back else ""
                reason = f"it is the right one of `{label}`{more}"
                yield Found("swapped-inputs", reason, {"that of": label}, weak=not back)
                return
    for first, second in list(_places(seen))[:MOST]:
        if seen.everywhere(partial(_is_with, first=first, second=second)):
            words = f"it is the right one if `{first}` and `{second}` change places"
            yield Found("swapped-inputs", words, {"swapped": f"{first}, {second}"}, weak=True)
            return
    names = [name for name, grad in seen.observation.grads.items() if grad is not None]
    for first, second in combinations(names, 2):
        if seen.everywhere(partial(_is_for, first=first, second=second)):
            words = f"it is the right one if what comes in for `{first}` and for `{second}` change places"
            yield Found("swapped-inputs", words, {"swapped": f"{first}, {second}"})
            return


def _is_of(pair: Pair, label: str) -> bool:
    others = pair.observation.others
    return others is not None and pair.is_(wide(others()[label][1]))


def _has_mine(pair: Pair, label: str) -> bool:
    others = pair.observation.others
    if others is None:
        return False
    got, right = others()[label]
    return got is not None and Pair(replace(pair.observation, got=got, expected=right)).is_(pair.right)


def _places(seen: Seen) -> list[tuple[str, str]]:
    """Pairs of arguments that may stand in each other's places: tensors of one form, or plain numbers."""
    inputs = seen.observation.inputs
    return [
        (first, second)
        for first, second in combinations(inputs, 2)
        if _form(inputs[first]) is not None and _form(inputs[first]) == _form(inputs[second])
    ]


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    return type(value) if isinstance(value, int | float) else None


def _is_with(pair: Pair, first: str, second: str) -> bool:
    at, inputs = pair.observation.right_at, pair.observation.inputs
    found = None if at is None else at({first: inputs[second], second: inputs[first]})
    return found is not None and pair.is_(wide(found))


def _is_for(pair: Pair, first: str, second: str) -> bool:
    right, grads = pair.observation.right, dict(pair.observation.grads)
    one, other = grads[first], grads[second]
    if right is None or one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    grads[first], grads[second] = other, one
    return pair.is_(wide(right(list(grads.values()))))
