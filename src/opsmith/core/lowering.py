"""Lowering of arguments: values that torch's dispatcher does not carry become values that it does."""

from __future__ import annotations

import operator
import os
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from opsmith.core.schema import Argument

_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType, types.EllipsisType)
LIMIT = 4096
"""How many objects that cannot be watched are held alive for calls that no graph holds."""


@dataclass(frozen=True)
class UnknownObject:
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
                return UnknownObject(token) if value is None else value
            return self._recent.get(token, UnknownObject(token))


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
    return _TOKENS.find(token) if isinstance(token, int) else UnknownObject(token)


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


class Lowering:
    """How the arguments of an operator become those of its schema, and back.

    torch.compile traces `call`: it is plain code over plain attributes.

    Args:
        arguments: The operator's arguments.
        leaves: Those of its schema: a structure has one for each of its parts.
        required: The default of an argument that has none.

    Attributes:
        objects: Whether some arguments are any objects at all.
    """

    def __init__(self, arguments: Sequence[Argument], leaves: Sequence[Argument], required: Any) -> None:
        self._arguments = list(arguments)
        self._by_name = {argument.name: argument for argument in arguments}
        self._names = {
            argument.name: [name for name, _ in argument.kind.leaves(argument.name)] for argument in arguments
        }
        self._leaves = list(leaves)
        self._positional = sum(not leaf.keyword_only for leaf in leaves)
        self._required = required
        self.objects = any(leaf.kind.base.lower is token_of for leaf in leaves)

    def call(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call of torch's operator that a call means: what is not given stays so.

        Raises:
            TypeError: If a value is not of its argument's kind, or belongs to no argument.
        """
        if len(args) > len(self._arguments):
            raise TypeError("too many arguments")
        lowered = []
        for position, value in enumerate(args):
            lowered += self._arguments[position].kind.lower(value)
        named = {}
        for name, value in kwargs.items():
            if name not in self._by_name:
                raise TypeError("no such argument")
            for leaf, part in zip(self._names[name], self._by_name[name].kind.lower(value), strict=True):
                named[leaf] = part
        return tuple(lowered), named

    def split(self, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments of torch's operator for the values of all arguments."""
        lowered: list[Any] = []
        for argument, value in zip(self._arguments, values, strict=True):
            lowered += argument.kind.lower(value)
        return lowered[: self._positional], {
            leaf.name: value
            for leaf, value in zip(self._leaves[self._positional :], lowered[self._positional :], strict=True)
        }

    def lift(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The values of all arguments, from a call of torch's operator: defaults filled in."""
        lowered = list(args)
        for leaf in self._leaves[len(args) :]:
            given = leaf.name in kwargs or leaf.default is self._required
            lowered.append(kwargs.get(leaf.name) if given else leaf.kind.lower(leaf.default)[0])
        rest = iter(lowered)
        return [argument.kind.lift(rest) for argument in self._arguments]
