"""Numbers that stand for objects in torch's dispatcher, which carries no objects.

An object keeps its number as long as it lives, and a number is never given to another object. Plain values
that are equal (tuples of strings, slices) share one. The numbers of one process mean nothing in another.
"""

from __future__ import annotations

import operator
import os
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType, types.EllipsisType)
LIMIT = 4096
"""How many objects that cannot be watched are held alive for calls that no graph holds."""


@dataclass(frozen=True)
class Unknown:
    """A number that stands for no object of this process."""

    token: int


class Tokens:
    """The numbers of this process, and what they stand for."""

    def __init__(self) -> None:
        # From a place of its own in each process, so that a number from elsewhere is seen to be none of ours.
        self._next = int.from_bytes(os.urandom(5)) << 20
        self._lock = threading.RLock()
        self._tokens: dict[Hashable, int] = {}
        self._keys: dict[int, Hashable] = {}
        self._pinned: dict[int, Any] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._recent: OrderedDict[int, Any] = OrderedDict()

    def take(self, value: Any, *, pin: bool) -> int:
        """The number of an object; `pin` keeps the object alive for as long as this process."""
        with self._lock:
            key = _key(value)
            token = self._tokens.get(key)
            if token is None:
                token = self._next = self._next + 1
                self._tokens[key], self._keys[token] = token, key
            if pin:
                self._pinned[token] = value
            elif token not in self._pinned and token not in self._watched:
                self._hold(token, value)
            return token

    def _hold(self, token: int, value: Any) -> None:
        if not isinstance(
            value, types.MethodType
        ):  # each look at a method makes a new one, which dies at once
            try:
                self._watched[token] = weakref.ref(value, lambda _: self._forget(token))
                return
            except TypeError:
                pass  # what cannot be watched is held, with a limit
        self._recent[token] = value
        self._recent.move_to_end(token)
        if len(self._recent) > LIMIT:
            oldest, _ = self._recent.popitem(last=False)
            self._forget(oldest)

    def _forget(self, token: int) -> None:
        with self._lock:
            self._watched.pop(token, None)
            if token not in self._pinned:
                del self._tokens[self._keys.pop(token)]

    def find(self, token: int) -> Any:
        """The object that a number stands for, or `Unknown`."""
        with self._lock:
            if token in self._pinned:
                return self._pinned[token]
            watched = self._watched.get(token)
            if watched is not None:
                value = watched()
                return Unknown(token) if value is None else value
            return self._recent.get(token, Unknown(token))


_TOKENS = Tokens()


def _key(value: Any) -> Hashable:
    """What tells an object from others: for plain values type and text, for others which object it is."""
    if type(value) in _PLAIN:  # an instance of a class of its own may hold more than its text shows
        return type(value), repr(value)
    if type(value) is tuple:
        return tuple, *map(_key, value)
    if type(value) is frozenset:
        return frozenset, frozenset(map(_key, value))
    if type(value) is slice:
        return slice, _key(value.start), _key(value.stop), _key(value.step)
    if type(value) is types.MethodType:
        return types.MethodType, id(value.__self__), id(value.__func__)
    return id(value)


def prepare() -> None:
    """Let compiled code take numbers as constants; it imports torch's compiler, which takes a while."""
    global _constant, _container
    if _constant is _pinned:
        _constant = torch.compiler.assume_constant_result(_pinned)
        _container = torch.compiler.assume_constant_result(_make_container)


def holds_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or a container of some: as an object its gradient would be lost."""
    if isinstance(value, dict):
        return any(map(holds_tensor, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(holds_tensor, value))
    return isinstance(value, torch.Tensor)


def token_of(value: Any) -> int:
    """The number of an object, as a constant where the call is being compiled.

    Raises:
        TypeError: For a tensor, or a container of tensors.
    """
    if torch.compiler.is_dynamo_compiling():
        return _traced(value)
    if holds_tensor(value):
        raise TypeError(torch.Tensor)
    return _TOKENS.take(value, pin=torch.compiler.is_compiling())


def object_of(token: Any) -> Any:
    """The object of a number; a value that is no number of this process comes back as `Unknown`."""
    return _TOKENS.find(token) if isinstance(token, int) else Unknown(token)


def _traced(value: Any) -> int:
    """The number of an object in code that torch compiles, which is a constant of that code.

    What the number depends on becomes a guard: of plain values the value, of other objects which one it is.
    """
    if isinstance(value, torch.Tensor):
        raise TypeError(torch.Tensor)
    if type(value) is tuple or type(value) is list:
        inside = ""
        for item in value:
            inside += f"{_traced(item)} "
        return _container(type(value).__name__, inside)
    if type(value) is dict:
        inside = ""
        for name, item in value.items():
            inside += f"{_traced(name)} {_traced(item)} "
        return _container("dict", inside)
    if type(value) is bool or type(value) is str or value is None:
        return _constant(value)
    if type(value) is int:
        return _constant(operator.index(value))  # a size that may change becomes the number that it is now
    id(value)  # a guard: another object does not find this code
    return _constant(value)


def _pinned(value: Any) -> int:
    return _TOKENS.take(value, pin=True)


def _make_container(name: str, inside: str) -> int:
    items = [_TOKENS.find(int(token)) for token in inside.split()]
    if name == "tuple":
        return _TOKENS.take(tuple(items), pin=True)
    if name == "list":
        return _TOKENS.take(items, pin=True)
    return _TOKENS.take(dict(zip(items[::2], items[1::2], strict=True)), pin=True)


_constant: Callable[[Any], int] = _pinned
_container: Callable[[str, str], int] = _make_container
# By version, which torch compares as numbers, and no capability: nothing private is used, and to try it out
# would import torch's compiler and run it, seconds in each process that has an argument of this kind.
TRACED = torch.__version__ >= "2.12"
"""Whether `id` of any object can be asked in compiled code, and is a guard there."""
