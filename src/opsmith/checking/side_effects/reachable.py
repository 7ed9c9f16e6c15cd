"""What the functions of an operator reach without taking it as an argument, and where it lies.

Closures, defaults, and the globals and attributes that the code names are followed, through the user's own
functions, classes and objects; installed libraries are left out. What C++ keeps to itself is not seen.
"""

from __future__ import annotations

import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.subject import Subject
from opsmith.core.formula import Formula
from opsmith.torch_library import capabilities

MOST = 2000
"""Places that are looked at, at most; an operator that reaches more is an application."""

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
CONTAINERS = (dict, list, set, deque)
"""What an operator may remember things in."""


@dataclass(frozen=True)
class Place:
    """Something that an operator's functions reach.

    Args:
        name: Where it lies, in words; empty for what is only followed.
        value: What lies there.
        get: Looks what lies there now; None where that cannot change.
        put: Lays something else there.
    """

    name: str
    value: Any
    get: Callable[[], Any] | None = None
    put: Callable[[Any], None] | None = None

    def now(self) -> Any:
        """What lies there now."""
        return self.value if self.get is None else self.get()

    @property
    def container(self) -> bool:
        """Whether it is a dictionary, list, set or deque."""
        return isinstance(self.value, CONTAINERS)


def _held(name: str, home: Any, key: str, owner: Any = None) -> Place:
    """What a module, an object or a class holds by a name; a class's dictionary takes no writes."""
    put = partial(home.__setitem__, key) if owner is None else partial(setattr, owner, key)
    return Place(name, home[key], partial(home.get, key), put)


def _cell(name: str, cell: types.CellType) -> Place:
    def get() -> Any:
        return cell.cell_contents

    def put(value: Any) -> None:
        cell.cell_contents = value

    return Place(name, cell.cell_contents, get, put)


def roots(subject: Subject) -> list[Any]:
    """The functions and classes that an operator is made of."""
    specification = subject.specification
    if specification.adopted is not None:
        found: list[Any] = [specification.adopted.function_class, specification.adopted.reference]
    elif subject.foreign:
        own = specification.own
        parts = capabilities.custom_parts(own.overload) if own is not None else None
        found = [] if parts is None else [parts.function, parts.backward, parts.setup_context, parts.fake]
    else:
        found = [specification.reference, specification.fake]
    found += [kernel.function for kernel in specification.kernels]
    found += [rule.function for rule in specification.gradients.rules.values() if isinstance(rule, Formula)]
    return [each for each in found if each is not None]


def reached(subject: Subject) -> list[Place]:
    """Everything that an operator's functions reach, each thing once."""
    places: list[Place] = []
    seen: dict[int, Any] = {}
    left = deque(Place("", root) for root in roots(subject))
    while left and len(places) < MOST:
        place = left.popleft()
        simple = _simple(place.value)
        if not simple and id(place.value) in seen:
            continue
        seen[id(place.value)] = place.value
        if place.name:
            places.append(place)
        left.extend(_inside(place.value))
    return places


def _inside(value: Any) -> Iterator[Place]:
    for matches, follow in _FOLLOW:
        if matches(value):
            yield from follow(value)
            return


def _function(function: types.FunctionType) -> Iterator[Place]:
    if is_library(function.__module__):
        wrapped = getattr(function, "__wrapped__", None)  # a decorator of a library around the user's own
        if wrapped is not None:
            yield Place("", wrapped)
        return
    said = f"`{function.__qualname__}`"
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield _cell(f"`{name}`, which {said} closes over", cell)
        except ValueError:  # not assigned yet
            continue
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield Place(f"a default of {said}", value)
    for name in vars(function):
        if name != "__wrapped__":
            yield _held(f"`{function.__qualname__}.{name}`", vars(function), name)
    if "__wrapped__" in vars(function):
        yield Place("", vars(function)["__wrapped__"])
    names = _names(function.__code__)
    for name in sorted(names & set(function.__globals__)):
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType):
            yield from _module(value, names)
        else:
            yield _held(_global(function.__globals__, name), function.__globals__, name)


def _global(scope: dict[str, Any], name: str) -> str:
    return f"`{name}` of the module `{scope.get('__name__', '?')}`"


def _module(module: types.ModuleType, names: set[str]) -> Iterator[Place]:
    if is_library(module.__name__):
        return
    scope = vars(module)
    for name in sorted(names & set(scope)):
        if not isinstance(scope[name], types.ModuleType):
            yield _held(_global(scope, name), scope, name)


def _names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _class(kind: type) -> Iterator[Place]:
    for base in kind.__mro__:
        if is_library(base.__module__):
            continue
        for name in list(vars(base)):
            if not (name.startswith("__") and name.endswith("__")):
                yield _held(f"`{base.__qualname__}.{name}`", vars(base), name, base)


def _object(thing: Any) -> Iterator[Place]:
    yield Place("", type(thing))
    for name in list(vars(thing)):
        yield _held(f"`{type(thing).__qualname__}.{name}`", vars(thing), name)


def _unwrapped(thing: Any) -> Iterator[Place]:
    for name in ("__func__", "__self__", "func", "args", "keywords", "fget", "fset", "__wrapped__"):
        inner = getattr(thing, name, None)
        for each in inner if isinstance(inner, tuple) else [inner]:
            if each is not None and not isinstance(each, types.ModuleType):
                yield Place("", each)


def _items(things: Any) -> Iterator[Place]:
    values = things.values() if isinstance(things, dict) else things
    for value in list(values)[:MOST]:
        if not _simple(value) and not isinstance(value, Tensor):
            yield Place("", value)


def _wraps(value: Any) -> bool:
    """Whether it is a method, a partial, a property or a cache around a function."""
    return any(hasattr(type(value), name) for name in ("__func__", "func", "fget")) or (
        callable(value) and hasattr(value, "__wrapped__")
    )


_FOLLOW: list[tuple[Callable[[Any], bool], Callable[[Any], Iterator[Place]]]] = [
    (lambda value: isinstance(value, Tensor | types.ModuleType), lambda value: iter(())),
    (lambda value: isinstance(value, types.FunctionType), _function),
    (_wraps, _unwrapped),
    (
        lambda value: isinstance(value, type),
        lambda value: iter(()) if _library_type(value) else _class(value),
    ),
    (lambda value: isinstance(value, (*CONTAINERS, tuple, frozenset)), _items),
    (lambda value: isinstance(value, torch.nn.Module), _object),
    (lambda value: hasattr(value, "__dict__") and not _library_type(type(value)), _object),
]


def _simple(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | complex | str | bytes)


def _library_type(kind: type) -> bool:
    return is_library(kind.__module__)


def is_library(module: str | None) -> bool:
    """Whether a module is installed rather than the user's own."""
    if module is None or module == "builtins" or module.partition(".")[0] in ("torch", "numpy"):
        return True
    if module.partition(".")[0] == "opsmith":
        return not module.startswith("opsmith.ops.")  # our operators are sources, like anyone's
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return module in sys.builtin_module_names
    return str(file).startswith(_LIBRARIES)


def tensors_within(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """The tensors in a value: itself, or what containers in it hold."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (*CONTAINERS, tuple, frozenset)):
        for each in list(value.values() if isinstance(value, dict) else value):
            yield from tensors_within(each, depth - 1)
