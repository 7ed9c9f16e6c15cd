"""Substitution: a copy of a function in which some of the functions that it names are replaced."""

from __future__ import annotations

import builtins
import dis
import functools
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from opsmith.core.reachable import is_library
from opsmith.core.source import names_in, nested

_CALLED = "()"
"""Suffix of a name that code looks up only to call it, since its value may be different there."""
_REBINDS = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})
_WHOLE = frozenset({"eval", "exec", "globals"})
"""Functions that take the globals of their caller as a dictionary."""


@dataclass(frozen=True)
class Substitution:
    """Replacements of functions in the copy of a function, and in copies of the author's functions it calls.

    The original function and all modules stay unchanged. Methods, and functions of installed libraries, are
    not copied: nothing is replaced in them.

    Args:
        values: Replacements of functions, by the `id` of the replaced function.
        called: Replacements of classes, only where code calls them by name: `type(x) is int` must see the
            class itself.
        modules: Libraries whose functions are replaced as attributes, too.
        package: Top-level package that counts as the author's although it is installed.

    Example:
        >>> import math
        >>> def root(x):
        ...     return math.sqrt(x) if isinstance(x, int) else float(x)
        >>> special = Substitution({id(math.sqrt): abs}, {id(float): str}, (math,))
        >>> special.copy(root)(4), special.copy(root)(0.5), root(4)
        (4, '0.5', 2.0)
    """

    values: Mapping[int, Any]
    called: Mapping[int, Any]
    modules: Collection[types.ModuleType] = ()
    package: str = ""

    def copy(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The copy of a function with the replacements; the same object if it is not a Python function."""
        copied: Callable[..., Any] = self.of(function)
        return copied

    def of(self, value: Any, *, called: bool = False) -> Any:
        """The value that the copy uses in place of a value.

        Args:
            value: The value that a name has.
            called: True if the code only calls it.
        """
        return self._of(value, called, {})

    def _of(self, value: Any, called: bool, known: dict[int, Any]) -> Any:
        found = self.called.get(id(value)) if called else None
        found = self.values.get(id(value)) if found is None else found
        if found is not None:
            return found
        if isinstance(value, types.FunctionType):
            return self._function(value, known)
        if isinstance(value, types.MethodType) and isinstance(value.__func__, types.FunctionType):
            return types.MethodType(self._function(value.__func__, known), value.__self__)
        if type(value) is functools.partial:
            return functools.partial(self._of(value.func, True, known), *value.args, **value.keywords)
        if _is_cache(value):
            return self._of(value.__wrapped__, called, known)
        if isinstance(value, types.ModuleType) and (value in self.modules or self._own(value.__name__)):
            return _ModuleView(self, value)
        return value

    def _own(self, module: str) -> bool:
        return module.partition(".")[0] == self.package or not is_library(module)

    def _may_change(self, cell: types.CellType) -> bool:
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            return False
        kinds = (types.FunctionType, types.MethodType, types.ModuleType, functools.partial)
        return isinstance(value, kinds) or _is_cache(value) or id(value) in self.values

    def _function(self, function: types.FunctionType, known: dict[int, Any]) -> types.FunctionType:
        if id(function) in known:
            copied: types.FunctionType = known[id(function)]
            return copied
        code, scope = function.__code__, function.__globals__
        if isinstance(scope, _Scope):  # it is already a copy
            return function
        own = self._own(scope.get("__name__", "")) and not _needs_its_globals(code)
        cells = function.__closure__ or ()
        copies = [types.CellType() if self._may_change(cell) else cell for cell in cells]
        if not own and all(map(_is, copies, cells)):
            return function
        if own:
            code, scope = _apart_if_called(code, _builtin_names(self.called)), _Scope(self, scope)
        copy = types.FunctionType(
            code, scope, function.__name__, function.__defaults__, tuple(copies) if cells else None
        )
        known[id(function)] = copy
        copy.__kwdefaults__, copy.__doc__ = function.__kwdefaults__, function.__doc__
        copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
        copy.__dict__ = function.__dict__  # both share one dictionary of attributes
        for cell, copied_cell in zip(cells, copies, strict=True):
            if copied_cell is not cell:
                copied_cell.cell_contents = self._of(cell.cell_contents, False, known)
        return copy


class _Scope(dict[str, Any]):
    """Globals of a copy: the current globals of the original, with the replacements.

    Python calls `__getitem__` for globals whose type is not exactly `dict`.
    """

    def __init__(self, substitution: Substitution, scope: dict[str, Any]) -> None:
        self._substitution, self._scope = substitution, scope
        # Python itself looks up these two in the dictionary.
        found = {"__builtins__": {**vars(builtins), "__import__": self._import}}
        super().__init__(found, __name__=scope.get("__name__"))

    def __getitem__(self, name: str) -> Any:
        own = name.removesuffix(_CALLED)
        value = self._scope[own] if own in self._scope else vars(builtins)[own]
        return self._substitution.of(value, called=own is not name)

    def _import(
        self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        return self._substitution.of(builtins.__import__(name, self._scope, locals, fromlist or (), level))


class _ModuleView(types.ModuleType):
    """A view of a module, whose attributes are the replacements."""

    def __init__(self, substitution: Substitution, module: types.ModuleType) -> None:
        super().__init__(module.__name__)
        vars(self).clear()
        vars(self)["_of"] = module, substitution

    def __getattr__(self, name: str) -> Any:
        module, substitution = vars(self)["_of"]
        return substitution.of(getattr(module, name))

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_of"][0], name, value)


def _is(one: Any, other: Any) -> bool:
    return one is other


def _is_cache(value: Any) -> bool:
    """True for a function made by `functools.cache`, which would look up a symbol by its hash."""
    return hasattr(value, "cache_parameters") and isinstance(
        getattr(value, "__wrapped__", None), types.FunctionType
    )


def _builtin_names(called: Mapping[int, Any]) -> frozenset[str]:
    return frozenset(name for name, value in vars(builtins).items() if id(value) in called)


def _needs_its_globals(code: types.CodeType) -> bool:
    """True for code that writes globals, or takes them as a dictionary, and so needs its module's globals."""
    instructions = (each for inner in nested(code) for each in dis.get_instructions(inner))
    return not _WHOLE.isdisjoint(names_in(code)) or any(each.opname in _REBINDS for each in instructions)


def _apart_if_called(code: types.CodeType, names: Collection[str]) -> types.CodeType:
    """Code that looks up these names by a different name where it calls their values.

    The lowest bit of the argument of `LOAD_GLOBAL` is set where the value is called (Python's manual, `dis`).
    In a function with more than 128 names, some calls stay unchanged.
    """
    nested = [
        _apart_if_called(each, names) if isinstance(each, types.CodeType) else each for each in code.co_consts
    ]
    text, found = bytearray(code.co_code), list(code.co_names)
    for each in dis.get_instructions(code):
        if each.opname != "LOAD_GLOBAL" or not (each.arg or 0) & 1 or each.argval not in names:
            continue
        name = each.argval + _CALLED
        if name not in found:
            found.append(name)
        argument = found.index(name) << 1 | 1
        if max(argument, each.arg or 0) < 256:
            text[each.offset + 1] = argument
    return code.replace(co_code=bytes(text), co_consts=tuple(nested), co_names=tuple(found))
