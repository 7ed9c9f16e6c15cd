"""Hidden state of an operator between calls, removed for a while, so that it runs as if called first.

Every reachable dictionary, list and set is emptied, every reachable tensor in a module or on a class is
replaced by None, and `functools` caches are cleared. State without which the operator fails stays. All
compared runs start in this way, so emptying a container that is not a memory does no harm.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.side_effects.reachable_state import reachable_values
from opsmith.checking.subject import Subject
from opsmith.core.reachable import CONTAINERS, Reached

MOST = 64
"""Largest number of values; further state is not removed."""


@dataclass(frozen=True)
class HiddenState:
    """Reachable values that may hold state between calls.

    Args:
        values: Containers, tensors and caches of functions.
    """

    values: tuple[Reached, ...]

    @classmethod
    def of(cls, subject: Subject, run: Callable[[], Any]) -> HiddenState:
        """Find the state that an operator reaches, and does not need.

        Args:
            subject: The checked operator.
            run: Makes a call; a value without which it raises stays.
        """
        found = [each for each in reachable_values(subject) if _may_hold_state(each)][:MOST]
        if _runs_without(found, run):
            return cls(tuple(found))
        return cls(tuple(each for each in found if _runs_without([each], run)))

    @contextmanager
    def away(self) -> Iterator[None]:
        """Remove the state within the context; restore it afterwards."""
        before = [(each, each.current(), _copied(each.current())) for each in self.values]
        self.clear()
        try:
            yield
        finally:
            for each, value, contents in before:
                _fill(value, contents)
                if each.current() is not value and each.put is not None:
                    each.put(value)

    def clear(self) -> None:
        """Clear the state."""
        for each in self.values:
            value = each.current()
            if hasattr(value, "cache_clear"):
                value.cache_clear()
            elif isinstance(value, Tensor):
                if each.put is not None:
                    each.put(None)
            elif (contents := _contents(value)) is not None:
                contents.clear()

    def filled(self) -> list[str]:
        """Return the names of the values that hold something now."""
        return [each.path for each in self.values if _holds(each.current())]


def _may_hold_state(each: Reached) -> bool:
    value = each.value
    if isinstance(value, torch.nn.Parameter):
        return False
    by_name = isinstance(value, Tensor) and each.put is not None
    return by_name or hasattr(value, "cache_clear") or _contents(value) is not None


def _runs_without(values: list[Reached], run: Callable[[], Any]) -> bool:
    """Return True if two calls in a row succeed without some state."""
    with HiddenState(tuple(values)).away():
        try:
            run()
            run()
        except Exception:  # the operator needs the state
            return False
    return True


def _contents(value: Any) -> Any:
    """The container in which a value holds state; None for a value that is not one."""
    if isinstance(value, threading.local):
        return vars(value)
    return value if isinstance(value, CONTAINERS) else None


def _copied(value: Any) -> Any:
    contents = _contents(value)
    return None if contents is None else contents.copy()


def _fill(value: Any, copied: Any) -> None:
    """Restore the contents of a container."""
    contents = _contents(value)
    if contents is None:
        return
    contents.clear()
    (contents.update if isinstance(contents, dict | set) else contents.extend)(copied)


def _holds(value: Any) -> bool:
    if hasattr(value, "cache_info"):
        return bool(value.cache_info().currsize)
    return isinstance(value, Tensor) or bool(_contents(value))
