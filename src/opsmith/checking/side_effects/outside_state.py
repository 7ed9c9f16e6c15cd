"""State outside of calls, as it was before a check: running statistics in globals, on classes, in modules.

A check makes hundreds of calls, some with nan. Each property begins with the state that the author left, and
so does each call where two runs would differ otherwise; the author gets it back at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opsmith.checking.samples.object_arguments import LARGE, ObjectState, TensorState
from opsmith.checking.side_effects.reachable_state import reachable_values, tensors_within
from opsmith.core.reachable import CONTAINERS, Reached

if TYPE_CHECKING:
    from opsmith.checking.subject import Subject

NUMBERS = int | float | complex
"""Types of counters: what is rebound to another number."""


@dataclass(frozen=True)
class SavedValue:
    """A reachable value as it was.

    Args:
        reached: Its location.
        value: The value.
        items: Items of a container that it is; None for any other value.
    """

    reached: Reached
    value: Any
    items: Any

    def restore(self) -> None:
        """Put the value back under its name, and its tensors back into a container."""
        now = self.reached.current()
        if now is not self.value and self.reached.put is not None and _may_change(self.value):
            self.reached.put(self.value)
        if self.items is not None and not _same_items(self.value, self.items):
            self.value.clear()
            (self.value.update if isinstance(self.value, dict | set) else self.value.extend)(self.items)


def _may_change(value: Any) -> bool:
    """Return True for a tensor or a number, which is state, and not for a flag, code or an object."""
    return isinstance(value, Tensor | NUMBERS) and not isinstance(value, bool)


def _same_items(container: Any, items: Any) -> bool:
    """Return True if a container has the same tensors and numbers; other items are ignored."""
    return [*_items(container)] == [*_items(items)]


def _items(container: Any) -> Iterator[tuple[Any, Any]]:
    pairs = container.items() if isinstance(container, dict) else enumerate(list(container))
    for key, item in list(pairs):
        if _may_change(item) and not isinstance(item, Tensor):
            yield key, repr(item)
        elif any(True for _ in tensors_within(item)):
            yield key, id(item)


@dataclass(frozen=True)
class OutsideState:
    """State that an operator reaches without taking it as an argument, as it was at one time.

    Args:
        values: Names and containers.
        tensors: The numbers of the tensors.
        modules: The state of the modules.
    """

    values: tuple[SavedValue, ...]
    tensors: tuple[TensorState, ...]
    modules: tuple[ObjectState, ...]

    @classmethod
    def of(cls, subject: Subject) -> OutsideState:
        """Save what an operator reaches now."""
        values, modules, room = [], [], LARGE
        tensors: dict[int, TensorState] = {}
        for reached in reachable_values(subject):
            value = reached.current()
            if isinstance(value, torch.nn.Module):
                modules.append(ObjectState.of(value))
                continue
            for each in tensors_within(value):
                copied = each.layout is torch.strided and not each.is_meta
                if id(each) not in tensors and copied and each.numel() <= room:
                    tensors[id(each)] = TensorState.of(each)
                    room -= each.numel()
            items = value.copy() if isinstance(value, CONTAINERS) else None
            if items is not None or _may_change(value):
                values.append(SavedValue(reached, value, items))
        return cls(tuple(values), tuple(tensors.values()), tuple(modules))

    def restore(self) -> None:
        """Make everything what it was."""
        for value in self.values:
            value.restore()
        for tensor in self.tensors:
            tensor.restore()
        for module in self.modules:
            module.restore()

    @contextmanager
    def fresh(self) -> Iterator[None]:
        """A region that begins with this state, and ends with it."""
        self.restore()
        try:
            yield
        finally:
            self.restore()
