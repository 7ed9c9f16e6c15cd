"""What an operator remembers from call to call, put away for a while: it then answers as if called first.

Every dictionary, list and set that its functions reach is emptied, each tensor that lies on a class or in a
module is exchanged for None, and `functools` caches are cleared; what the operator cannot do without stays.
Since all that is compared is then run in the same way, it does no harm to empty what is no memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.side_effects.reachable import CONTAINERS, Place, reached
from opsmith.checking.subject import Subject

MOST = 64
"""Places that are tried; an operator that reaches more has a memory that is not looked into."""


@dataclass(frozen=True)
class Memory:
    """Places where something may be remembered.

    Args:
        places: Containers, tensors and caches of functions.
    """

    places: tuple[Place, ...]

    @classmethod
    def of(cls, subject: Subject, run: Callable[[], Any]) -> Memory:
        """Where an operator may remember something, and does without.

        Args:
            subject: What is under check.
            run: A call; what it raises without a place is a reason to leave that place as it is.
        """
        found = [place for place in reached(subject) if _remembers(place)][:MOST]
        if _goes(found, run):
            return cls(tuple(found))
        return cls(tuple(place for place in found if _goes([place], run)))

    @contextmanager
    def away(self) -> Iterator[None]:
        """A region that begins without any memory; afterwards all is as it was."""
        before = [(place, place.now(), _copied(place.now())) for place in self.places]
        self.forget()
        try:
            yield
        finally:
            for place, value, contents in before:
                _fill(value, contents)
                if place.now() is not value and place.put is not None:
                    place.put(value)

    def forget(self) -> None:
        """Empty every place."""
        for place in self.places:
            value = place.now()
            if hasattr(value, "cache_clear"):
                value.cache_clear()
            elif isinstance(value, Tensor):
                if place.put is not None:
                    place.put(None)
            elif isinstance(value, threading.local):
                vars(value).clear()
            elif place.container:
                value.clear()

    def filled(self) -> list[str]:
        """The places that hold something now, by name."""
        return [place.name for place in self.places if _holds(place.now())]


def _remembers(place: Place) -> bool:
    value = place.value
    if isinstance(value, torch.nn.Parameter):
        return False
    by_name = isinstance(value, Tensor) and place.put is not None
    return by_name or place.container or hasattr(value, "cache_clear") or isinstance(value, threading.local)


def _goes(places: list[Place], run: Callable[[], Any]) -> bool:
    """Whether a call goes well without what lies in some places, and the next one as well."""
    with Memory(tuple(places)).away():
        try:
            run()
            run()
        except Exception:  # it is the answer
            return False
    return True


def _copied(value: Any) -> Any:
    if isinstance(value, threading.local):
        return dict(vars(value))
    return value.copy() if isinstance(value, CONTAINERS) else None


def _fill(value: Any, contents: Any) -> None:
    """Put contents back into a container."""
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
