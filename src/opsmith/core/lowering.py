"""Lowering of arguments: conversion of values that torch's dispatcher cannot carry to values that it can."""

from __future__ import annotations

import operator
import os
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from opsmith.core.forked_locks import lock_of


class LoweredArgument(Protocol):
    """The part of an argument of a schema that its conversion uses."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def kind(self) -> Any:
        """Its type."""

    @property
    def default(self) -> Any:
        """Its default value."""

    @property
    def keyword_only(self) -> bool:
        """True if it is keyword-only."""


_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType, types.EllipsisType)


@dataclass(frozen=True)
class UnknownObject:
    """A number that does not belong to an object of this process."""

    token: int


class _Holder:
    """A holder, which supports weak references, of an object that does not."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _HeldNumber(int):
    """The number of a held object: it keeps the holder alive, and so the object, too."""

    holder: _Holder


class Tokens:
    """Numbers of this process that represent objects, since torch's dispatcher cannot carry objects.

    An object keeps its number as long as it lives, and a number is never reused. An object without support
    for weak references keeps its number as long as the number is referenced, as by a running call. Equal
    plain values (tuples of strings, slices) share a number. The numbers mean nothing in another process.
    """

    def __init__(self) -> None:
        # Each process starts at a random number, so that a number from another process is not found.
        self._next = int.from_bytes(os.urandom(5)) << 20
        self._lock = lock_of(self, "_lock")
        self._tokens: dict[Hashable, int] = {}
        self._pinned: dict[int, Any] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}

    def take(self, value: Any, *, pin: bool) -> int:
        """Return the number of an object; `pin` keeps the object alive until the process ends."""
        with self._lock:
            key = _key(value)
            token = self._tokens.get(key)
            # A garbage collection between the two look-ups may remove an equal value.
            watched = None if token is None else self._watched.get(token, lambda: None)()
            if token is None or watched is None:
                token, watched = self._next + 1, _watchable(value)
                self._next = token
                self._watched[token] = weakref.ref(watched, lambda _: self._forget(token, key))
                self._tokens[key] = token  # last: an interrupt or a fork may come before
            if pin:
                self._pinned[token] = watched
            if type(watched) is not _Holder:
                return token
            number = _HeldNumber(token)
            number.holder = watched
            return number

    def _forget(self, token: int, key: Hashable) -> None:
        with self._lock:
            if self._tokens.get(key) == token:
                del self._tokens[key]
            self._watched.pop(token, None)  # last, since `take` looks up each number of `_tokens`

    def find(self, token: int) -> Any:
        """Return the object of a number, or `UnknownObject`."""
        watched = self._watched.get(token, lambda: None)()
        if watched is None:
            return UnknownObject(token)
        return watched.value if type(watched) is _Holder else watched


def _watchable(value: Any) -> Any:
    """Return an object that supports weak references, and lives as long as a value or keeps it alive."""
    try:
        weakref.ref(value)
    except TypeError:
        return _Holder(value)
    # Each access to a method creates a new object, which is freed at once.
    return _Holder(value) if isinstance(value, types.MethodType) else value


_TOKENS = Tokens()


def _key(value: Any) -> Hashable:
    """Return the identity of an object: type and text for a plain value, `id` for others."""
    if type(value) in _PLAIN:  # an instance of a subclass may contain more than its text shows
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
    """Make the numbers constants in compiled code; this imports torch's compiler, which is slow."""
    global _constant, _container
    if _constant is _pinned:
        _constant = torch.compiler.assume_constant_result(_pinned)
        _container = torch.compiler.assume_constant_result(_make_container)


def holds_tensor(value: Any) -> bool:
    """Return True for a tensor or container of tensors: carried as an object, it would lose its gradient."""
    if isinstance(value, dict):
        return any(map(holds_tensor, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(holds_tensor, value))
    return isinstance(value, torch.Tensor)


def token_of(value: Any) -> int:
    """Return the number of an object; as a constant while a call is compiled.

    Raises:
        TypeError: For a tensor, or a container of tensors.
    """
    if torch.compiler.is_dynamo_compiling():
        return _traced(value)
    if holds_tensor(value):
        raise TypeError(torch.Tensor)
    return _TOKENS.take(value, pin=torch.compiler.is_compiling() or recording())


def recording() -> bool:
    """Return True if operations are being recorded into a graph."""
    tracer: Any = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return tracer is not None and tracer.get_proxy_mode() is not None


def object_of(token: Any) -> Any:
    """Return the object of a number, or `UnknownObject` if the number is not of this process."""
    return _TOKENS.find(token) if isinstance(token, int) else UnknownObject(token)


def _traced(value: Any) -> int:
    """Return the number of an object in code that torch compiles, as a constant of that code.

    Guards are added: on the value of plain data, on the identity of any other object.
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
        return _constant(operator.index(value))  # a symbolic size becomes its current value
    id(value)  # a guard: the code is not used for another object
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
# Decided by torch's version, not by a capability: nothing private is used, and a self-test would import and
# run torch's compiler, which takes seconds in each process.
TRACED = torch.__version__ >= "2.12"
"""True if compiled code can guard on `id` of any object."""


class Lowering:
    """Conversion of an operator's arguments to the arguments of its schema, and back.

    torch.compile traces `call`, so it is plain code over plain attributes.

    Args:
        arguments: The operator's arguments.
        leaves: The arguments of its schema: a structure has one for each of its parts.
        required: Marker of an argument without a default.

    Attributes:
        objects: True if an argument may be any object.
    """

    def __init__(
        self, arguments: Sequence[LoweredArgument], leaves: Sequence[LoweredArgument], required: Any
    ) -> None:
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
        """Return the arguments of torch's operator for a call, without arguments that were not given.

        Raises:
            TypeError: If a value is not of its argument's type, or belongs to no argument.
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
        """Return the positional and keyword arguments of torch's operator for the values of all arguments."""
        lowered: list[Any] = []
        for argument, value in zip(self._arguments, values, strict=True):
            lowered += argument.kind.lower(value)
        return lowered[: self._positional], {
            leaf.name: value
            for leaf, value in zip(self._leaves[self._positional :], lowered[self._positional :], strict=True)
        }

    def lift(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the values of all arguments of a call of torch's operator, with defaults filled in."""
        lowered = list(args)
        for leaf in self._leaves[len(args) :]:
            given = leaf.name in kwargs or leaf.default is self._required
            lowered.append(kwargs.get(leaf.name) if given else leaf.kind.lower(leaf.default)[0])
        rest = iter(lowered)
        return [argument.kind.lift(rest) for argument in self._arguments]
