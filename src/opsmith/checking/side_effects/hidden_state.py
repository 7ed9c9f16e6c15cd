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
            elif isinstance(value, threading.local):
                vars(value).clear()
            elif each.is_container:
                value.clear()

    def filled(self) -> list[str]:
        """Return the names of the values that hold something now."""
        return [each.path for each in self.values if _holds(each.current())]


def _may_hold_state(each: Reached) -> bool:
    value = each.value
    if isinstance(value, torch.nn.Parameter):
        return False
    by_name = isinstance(value, Tensor) and each.put is not None
    return by_name or each.is_container or hasattr(value, "cache_clear") or isinstance(value, threading.local)


def _runs_without(values: list[Reached], run: Callable[[], Any]) -> bool:
    """Report whether two calls in a row succeed without some state."""
    with HiddenState(tuple(values)).away():
        try:
            run()
            run()
        except Exception:  # the operator needs the state
            return False
    return True


def _copied(value: Any) -> Any:
    if isinstance(value, threading.local):
        return dict(vars(value))
    return value.copy() if isinstance(value, CONTAINERS) else None


def _fill(value: Any, contents: Any) -> None:
    """Restore the contents of a container."""
    if contents is None:
        return
    if isinstance(value, threading.local):
        vars(value).clear()
        vars(value).update(contents)
        return
    value.clear()
    if isinstance(value, dict | set):
        value.update(contents)
    else:
        value.extend(contents)


def _holds(value: Any) -> bool:
    if hasattr(value, "cache_info"):
        return bool(value.cache_info().currsize)
    if isinstance(value, threading.local):
        return bool(vars(value))
    return isinstance(value, Tensor) or (isinstance(value, CONTAINERS) and bool(value))
