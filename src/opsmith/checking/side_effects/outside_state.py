"""State outside of calls: values that an operator reaches without taking them as arguments.

Running statistics are in globals, classes and modules, caches in dictionaries. A check makes hundreds of
calls, some with nan. Each property begins with the state that the author left. So does each call, if two runs
would differ otherwise. The state is restored at the end. `HiddenState` removes it for a while, so that an
operator runs as if called for the first time.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.samples.object_arguments import ObjectState, TensorState
from opsmith.core.reachable import CONTAINERS, Reached, Step, uses
from opsmith.judging.compare import same_bits

MOST = 2000
"""Maximum number of reported values; an operator that reaches more is an application."""

LARGE = 1 << 22
"""Number of elements of a tensor beyond which its bits are not copied."""

NUMBERS = int | float | complex
"""Types of counters, which are variables that get new numbers."""


def reachable_values(functions: Iterable[Any]) -> list[Reached]:
    """List the values that an operator's functions reach by a name, without repeated objects."""
    found: list[Reached] = []
    seen: dict[int, Any] = {}
    left = deque(Reached("", function) for function in functions)
    while left and len(found) < MOST:
        each = left.popleft()
        if not _is_plain(each.value) and id(each.value) in seen:
            continue
        seen[id(each.value)] = each.value
        if each.path and not isinstance(each.value, ModuleType):
            found.append(each)
        left.extend(inner for inner in islice(uses(each.value), MOST) if _is_followed(inner))
    return found


def _is_followed(each: Reached) -> bool:
    """False for special methods of classes, and for items of containers that reach no state."""
    if each.step is Step.ITEM:
        return not _is_plain(each.value) and not isinstance(each.value, Tensor)
    return each.step is not Step.ATTRIBUTE or not (each.name.startswith("__") and each.name.endswith("__"))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | complex | str | bytes)


def tensors_within(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """Yield the tensors in a value: the value itself, or tensors in its containers."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (*CONTAINERS, tuple, frozenset)):
        for each in list(value.values() if isinstance(value, dict) else value):
            yield from tensors_within(each, depth - 1)


def _has_tensors(value: Any) -> bool:
    return any(True for _ in tensors_within(value))


def short_repr(value: Any) -> str:
    """Format a value for a message, in at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def contents(value: Any) -> Any:
    """The container in which a value keeps state; None if the value is no container."""
    if isinstance(value, threading.local):
        return vars(value)
    return value if isinstance(value, CONTAINERS) else None


@dataclass(frozen=True)
class SavedValue:
    """A reachable value with its saved state.

    Args:
        reached: Its location.
        value: The value.
        items: Items, if it is a container; None for any other value.
        states: The state of a module, of a tensor, or of the tensors in it.
    """

    reached: Reached
    value: Any
    items: Any
    states: tuple[TensorState | ObjectState, ...] = ()

    @classmethod
    def of(cls, reached: Reached, saved: Callable[[Tensor], TensorState] | None = None) -> SavedValue:
        """Save the current state of a value.

        Args:
            reached: Its location.
            saved: Function that saves a tensor; None to save no numbers.
        """
        value = reached.current()
        states: tuple[TensorState | ObjectState, ...] = ()
        held = contents(value)
        if saved is not None:
            module = isinstance(value, torch.nn.Module)
            states = (ObjectState.of(value, saved),) if module else tuple(map(saved, tensors_within(value)))
        return cls(reached, value, None if held is None else held.copy(), states)

    def restore(self, *, wholly: bool = False) -> None:
        """Restore the value under its name if it is state, and a container's tensors, or all its items."""
        moved = self.reached.current() is not self.value
        if moved and self.reached.put is not None and (wholly or _may_change(self.value)):
            self.reached.put(self.value)
        held = contents(self.value)
        if self.items is not None and (wholly or [*_state_in(held)] != [*_state_in(self.items)]):
            held.clear()
            (held.update if isinstance(held, dict | set) else held.extend)(self.items)
        for each in self.states:
            each.restore()

    def change(self) -> str | None:
        """Describe the change since then; None if there is none.

        Added tensors, and tensors of a different form, are left out: `memory` and `state` test for tensors
        that are kept too long, or used by later calls.
        """
        was, now = self.value, self.reached.current()
        state = self.states[0] if self.states else None
        if isinstance(state, TensorState) and state.tensor is was and isinstance(now, Tensor):
            return _change_of_tensor(state, now)
        if isinstance(state, ObjectState) and isinstance(now, torch.nn.Module):
            return _change_of_module(state, now)
        held = contents(now)
        if self.items is not None and held is not None:
            return _change_of_items(self.items, held)
        if _key(was) == _key(now) or _has_tensors(was) or _has_tensors(now):
            return None
        return f"it was {short_repr(was)} before and is {short_repr(now)} after"


def _may_change(value: Any) -> bool:
    """Return True for a tensor or a number, which are state; False for a flag, code or an object."""
    return isinstance(value, Tensor | NUMBERS) and not isinstance(value, bool)


def _state_in(container: Any) -> Iterator[tuple[Any, Any]]:
    """The tensors and numbers in a container, in a form that can be compared; other items are ignored."""
    pairs = container.items() if isinstance(container, dict) else enumerate(list(container))
    for key, item in list(pairs):
        if _may_change(item) and not isinstance(item, Tensor):
            yield key, repr(item)
        elif _has_tensors(item):
            yield key, id(item)


def _change_of_tensor(was: TensorState, now: Tensor) -> str | None:
    dense = now.layout is torch.strided and not now.is_meta
    other = dense and was.numbers is not None and not same_bits(was.numbers, now)
    if now is not was.tensor:  # a tensor of the same form under the same name, such as running statistics
        alike = (was.tensor.shape, was.tensor.dtype) == (now.shape, now.dtype)
        return "it is replaced by a tensor with other numbers" if other and alike else None
    if was.requires_grad != now.requires_grad:
        return f"its requires_grad was {was.requires_grad} before and is {now.requires_grad} after"
    if other:
        return "its numbers change with each call"
    if was.other_grad():
        return "its `.grad` was written, though `torch.autograd.grad` asked for other gradients"
    return None


def _change_of_module(was: ObjectState, now: torch.nn.Module) -> str | None:
    training = was.training[0][1]
    if training != now.training:
        return f"its `training` was {training} before and is {now.training} after"
    named = dict([*now.named_parameters(), *now.named_buffers()])
    for name, state in was.tensors.items():
        what = _change_of_tensor(state, named[name]) if name in named else None
        if what is not None:
            return f"its `{name}` changed: {what}"
    return None


def _change_of_items(was: Any, now: Any) -> str | None:
    count, added = len(was), len(now) - len(was)
    if added > 0 and not _has_tensors(now):
        entries = "entry" if count == 1 else "entries"
        return f"it grows with each call: it had {count} {entries} before and has {len(now)} after"
    if not added and _keys(was) != _keys(now):
        return "its contents change with each call"
    return None


def _keys(container: Any) -> Any:
    if isinstance(container, dict):
        return {_key(key): _key(item) for key, item in list(container.items())}
    items = [_key(item) for item in list(container)]
    return sorted(map(repr, items)) if isinstance(container, set) else items


def _key(value: Any) -> Any:
    """Return a key for comparison: a simple value itself, a constant for tensors, else the type."""
    if isinstance(value, Tensor):
        return "a tensor"
    if _is_plain(value):
        return repr(value) if isinstance(value, float | complex) else value  # nan equals nan
    if isinstance(value, tuple):
        return tuple(_key(item) for item in value)
    return type(value)


@dataclass(frozen=True)
class OutsideState:
    """State that an operator reaches without taking it as an argument, saved at one time.

    Args:
        values: All values that are reached by a name.
    """

    values: tuple[SavedValue, ...]

    @classmethod
    def of(cls, functions: Iterable[Any], room: float = math.inf) -> OutsideState:
        """Save the current state that an operator reaches.

        Args:
            functions: The functions and classes of which the operator consists.
            room: Maximum number of elements of all copied tensors, each of which has at most `LARGE`.
        """
        left = room
        tensors: dict[int, TensorState] = {}

        def saved(tensor: Tensor) -> TensorState:
            nonlocal left
            if id(tensor) not in tensors:
                copied = tensor.layout is torch.strided and not tensor.is_meta
                copied = copied and tensor.numel() <= min(left, LARGE)
                left -= tensor.numel() if copied else 0
                tensors[id(tensor)] = TensorState.of(tensor, copied=copied)
            return tensors[id(tensor)]

        return cls(tuple(SavedValue.of(reached, saved) for reached in reachable_values(functions)))

    def changes(self) -> Iterator[tuple[str, str]]:
        """Yield the names of the values that have changed, each with a description of the change."""
        for each in self.values:
            change = each.change()
            if change is not None:
                yield each.reached.path, change

    def restore(self) -> None:
        """Restore all values."""
        for value in self.values:
            value.restore()

    @contextmanager
    def fresh(self) -> Iterator[None]:
        """A region that begins and ends with this state."""
        self.restore()
        try:
            yield
        finally:
            self.restore()


MOST_HIDDEN = 64
"""Maximum number of values that are removed; further state is kept."""


@dataclass(frozen=True)
class HiddenState:
    """Reachable values that may contain state between calls, and without which the operator runs.

    Every dictionary, list and set is emptied, every tensor in a module or class is replaced by None, and
    `functools` caches are cleared. All compared runs start in this way, so that emptying a container without
    state does no harm.

    Args:
        values: Containers, tensors and caches of functions.
    """

    values: tuple[Reached, ...]

    @classmethod
    def of(
        cls, functions: Iterable[Any], run: Callable[[], Any], defaults: Iterable[Any] = ()
    ) -> HiddenState:
        """Find the state that an operator reaches but does not need.

        Args:
            functions: The functions and classes of which the operator consists.
            run: Makes a call; a value without which it raises is kept.
            defaults: Defaults of arguments, such as lists, which are no state.
        """
        others = {*map(id, defaults)}
        found = [
            each
            for each in reachable_values(functions)
            if _may_hold_state(each) and id(each.value) not in others
        ][:MOST_HIDDEN]
        if cls(tuple(found)).runs_without(run):
            return cls(tuple(found))
        return cls(tuple(each for each in found if cls((each,)).runs_without(run)))

    @contextmanager
    def away(self) -> Iterator[None]:
        """Remove the state within the context; restore it afterwards."""
        before = [SavedValue.of(each) for each in self.values]
        self.clear()
        try:
            yield
        finally:
            for each in before:
                each.restore(wholly=True)

    def clear(self) -> None:
        """Clear the state."""
        for each in self.values:
            value = each.current()
            if hasattr(value, "cache_clear"):
                value.cache_clear()
            elif isinstance(value, Tensor):
                if each.put is not None:
                    each.put(None)
            elif (held := contents(value)) is not None:
                held.clear()

    def filled(self) -> list[str]:
        """Return the names of the values that are not empty now."""
        return [each.path for each in self.values if _holds(each.current())]

    def runs_without(self, run: Callable[[], Any]) -> bool:
        """Return True if two calls in a row succeed without the state."""
        with self.away():
            try:
                run()
                run()
            except Exception:  # the operator needs the state
                return False
        return True


def _may_hold_state(each: Reached) -> bool:
    value = each.value
    if isinstance(value, torch.nn.Parameter):
        return False
    by_name = isinstance(value, Tensor) and each.put is not None
    return by_name or hasattr(value, "cache_clear") or contents(value) is not None


def _holds(value: Any) -> bool:
    if hasattr(value, "cache_info"):
        return bool(value.cache_info().currsize)
    return isinstance(value, Tensor) or bool(contents(value))
