"""Reachable code and state: values that a function uses without taking them as arguments.

`uses` takes one step: from a function to its closure, defaults, attributes and globals; from a class or an
object to its attributes; from a wrapper to the wrapped function; from a container to its items. The source
hash, the refusal of captured tensors and the checks for hidden state use it. Installed libraries are not
entered. State that C++ code keeps is not found.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

import torch

from opsmith import errors
from opsmith.core.location import where
from opsmith.core.source import names_in, nested

CONTAINERS = (dict, list, set, deque)
"""Mutable containers, which may contain state."""
_WRAPPED = ("__func__", "__self__", "func", "args", "keywords", "fget", "fset", "__wrapped__")
_NOT_CODE = ("__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__", "__static_attributes__")
_MADE_FROM = ("__dataclass_fields__", "__dataclass_params__")
"""Attributes of a dataclass that are not followed: the methods made from them are followed."""
_GLOBAL_INSTRUCTIONS = frozenset(
    {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
)


class Step(Enum):
    """The relation of a value to the value that uses it."""

    CLOSURE = auto()
    DEFAULT = auto()
    GLOBAL = auto()
    MODULE_MEMBER = auto()
    ATTRIBUTE = auto()
    BASE = auto()
    TYPE = auto()
    WRAPPED = auto()
    ITEM = auto()


@dataclass(frozen=True, slots=True)
class Reached:
    """A value that code reaches.

    Args:
        path: Description for messages, such as "`scale` of the module `demo`"; empty for a value without a
            name, such as an item of a container.
        value: The value when it was reached.
        step: Its relation to the value that uses it.
        name: The identifier under which the other value uses it.
        get: Returns the current value; None if it cannot be replaced.
        put: Replaces the value.
    """

    path: str
    value: Any
    step: Step = Step.ITEM
    name: str = ""
    get: Callable[[], Any] | None = None
    put: Callable[[Any], None] | None = None

    def current(self) -> Any:
        """Return the current value."""
        return self.value if self.get is None else self.get()


def uses(value: Any) -> Iterator[Reached]:
    """Yield the values that a value uses directly, in the same order in every process."""
    if isinstance(value, torch.Tensor | types.ModuleType):
        return
    if isinstance(value, types.FunctionType):
        if not is_library(value.__module__):
            yield from function_uses(value)
        elif hasattr(value, "__wrapped__"):  # a decorator of a library around the user's function
            yield Reached("", value.__wrapped__, Step.WRAPPED, "__wrapped__")
    elif is_wrapper(value):
        yield from _wrapped(value)
    elif isinstance(value, type):
        if not is_library(value.__module__):
            yield from _class_uses(value)
    elif isinstance(value, (*CONTAINERS, tuple, frozenset)):
        for item in list(value.values() if isinstance(value, dict) else value):
            yield Reached("", item)
    elif isinstance(value, torch.nn.Module) or (
        hasattr(value, "__dict__") and not is_library(type(value).__module__)
    ):
        yield Reached("", type(value), Step.TYPE)
        for name in list(vars(value)):
            yield _attribute(type(value), name, vars(value))


def function_uses(function: types.FunctionType) -> Iterator[Reached]:
    """Yield the values that a function uses directly, even for a function of an installed library.

    Example:
        >>> def scaled_by(factor):
        ...     return lambda x, offset=1: x * factor + offset
        >>> [(each.step.name, each.name, each.value) for each in function_uses(scaled_by(3))]
        [('CLOSURE', 'factor', 3), ('DEFAULT', '0', 1)]
    """
    qualname = f"`{function.__qualname__}`"
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield _closure(f"`{name}`, which {qualname} closes over", name, cell)
        except ValueError:  # not assigned yet, as in a function that refers to itself
            continue
    defaults = {
        **{str(i): value for i, value in enumerate(function.__defaults__ or ())},
        **(function.__kwdefaults__ or {}),
    }
    for name, value in defaults.items():
        yield Reached(f"a default of {qualname}", value, Step.DEFAULT, name)
    for name in list(vars(function)):
        if name == "__wrapped__":
            yield Reached("", vars(function)[name], Step.WRAPPED, name)
        else:
            yield _attribute(function, name, vars(function))
    scope, visited = function.__globals__, {id(function.__globals__)}
    for name in sorted(_global_names(function.__code__) & set(scope)):
        yield _global(Step.GLOBAL, name, scope)
        if isinstance(scope[name], types.ModuleType):
            yield from _members(scope[name], names_in(function.__code__), visited)


def _members(module: types.ModuleType, names: frozenset[str], visited: set[int]) -> Iterator[Reached]:
    """Yield the members of a module, and of the user's modules in it, that code names."""
    scope = vars(module)
    if is_library(module.__name__) or id(scope) in visited:
        return
    visited.add(id(scope))
    for name in sorted(names & set(scope)):
        yield _global(Step.MODULE_MEMBER, name, scope)
        if isinstance(scope[name], types.ModuleType):
            yield from _members(scope[name], names, visited)


def _class_uses(kind: type) -> Iterator[Reached]:
    for name in list(vars(kind)):
        if name not in (*_NOT_CODE, *_MADE_FROM):  # a class's dictionary is read-only
            yield _attribute(kind, name, vars(kind), partial(setattr, kind, name))
    for base in kind.__bases__:
        yield Reached("", base, Step.BASE)


def _wrapped(value: Any) -> Iterator[Reached]:
    for name in _WRAPPED:
        inner = getattr(value, name, None)
        for each in inner if isinstance(inner, tuple) else [inner]:
            if each is not None and not isinstance(each, types.ModuleType):
                yield Reached("", each, Step.WRAPPED, name)


def is_wrapper(value: Any) -> bool:
    """True for a method, a partial, a property or a cache around a function."""
    return any(hasattr(type(value), name) for name in ("__func__", "func", "fget")) or (
        callable(value) and hasattr(value, "__wrapped__")
    )


def _closure(path: str, name: str, cell: types.CellType) -> Reached:
    def get() -> Any:
        return cell.cell_contents

    def put(value: Any) -> None:
        cell.cell_contents = value

    return Reached(path, cell.cell_contents, Step.CLOSURE, name, get, put)


def _global(step: Step, name: str, scope: dict[str, Any]) -> Reached:
    path = f"`{name}` of the module `{scope.get('__name__', '?')}`"
    return Reached(path, scope[name], step, name, partial(scope.get, name), partial(scope.__setitem__, name))


def _attribute(owner: Any, name: str, scope: Any, put: Callable[[Any], None] | None = None) -> Reached:
    path = f"`{owner.__qualname__}.{name}`"
    put = put or partial(scope.__setitem__, name)
    return Reached(path, scope[name], Step.ATTRIBUTE, name, partial(scope.get, name), put)


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> frozenset[str]:
    """Return the globals that code, and the code nested in it, loads or stores."""
    instructions = (each for inner in nested(code) for each in dis.get_instructions(inner))
    return frozenset(each.argval for each in instructions if each.opname in _GLOBAL_INSTRUCTIONS)


@functools.cache
def _library_folders() -> tuple[str, ...]:
    import sysconfig  # slow to import

    return tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_library(module: str | None) -> bool:
    """True for the name of a module that is installed and not written by the user.

    Example:
        >>> is_library("torch.nn"), is_library("opsmith.ops.linear")
        (True, False)
    """
    if module is None or module == "builtins" or module.partition(".")[0] in ("torch", "numpy"):
        return True
    if module.partition(".")[0] == "opsmith":
        return not module.startswith("opsmith.ops.")  # the bundled operators count as the user's code
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return module in sys.builtin_module_names
    return str(file).startswith(_library_folders())


def refuse_captured_tensors(function: Callable[..., Any], operator: str) -> None:
    """Refuse a reference that uses a tensor or a module that requires a gradient, without taking it.

    Autograd computes gradients only for an operator's arguments.

    Raises:
        CapturedTensorError: With the name of the captured tensor or module.
    """
    if not isinstance(function, types.FunctionType):
        return
    for each in function_uses(function):
        if each.step not in (Step.CLOSURE, Step.GLOBAL):
            continue
        parameters = each.value.parameters() if isinstance(each.value, torch.nn.Module) else [each.value]
        if any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in parameters):
            raise errors.CapturedTensorError(
                f"it uses `{each.name}`, which requires a gradient but is not an argument",
                operator=operator,
                argument=each.name,
                expected="a function that uses only its arguments",
                got=type(each.value).__name__,
                where=where(function),
                hint=f"make it an argument, `{each.name}: Tensor`, or compute `{each.name}.detach()` outside",
            )
