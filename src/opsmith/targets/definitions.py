"""Definitions of a module: `autograd.Function` classes, and operators of torch.library."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch

from opsmith import errors
from opsmith.adopting.function_class import is_function_class
from opsmith.adopting.registered import custom_function, is_custom_op, is_operator, name_of
from opsmith.core.operator import Operator
from opsmith.declaration import declared_operators
from opsmith.torch_library import capabilities

Class = type[torch.autograd.Function]


def classes_of(module: ModuleType, name: str | None = None, *, inside: bool = False) -> dict[str, Class]:
    """Return the Function classes of a module by name, in the order of the file.

    Imported classes are left out. A class made by a factory of this file is included, under its variable.

    Args:
        module: The module.
        name: The only class to return, which may be imported; nested names have dots.
        inside: True to include the imported modules of a package.

    Raises:
        OperatorNotFoundError: If there is no class, or no class of this name.

    Example:
        >>> import torch.utils.checkpoint
        >>> "CheckpointFunction" in classes_of(torch.utils.checkpoint)
        True
    """
    if name is not None:
        return {name: _named(module, name)}
    found = classes_in(module, inside=inside)
    if not found:
        raise errors.OperatorNotFoundError(
            f"`{_location(module)}` defines no `autograd.Function`",
            hint="name the file that defines some: imported classes, and classes made inside functions, do "
            "not count",
        )
    return found


def classes_in(module: ModuleType, *, inside: bool = False) -> dict[str, Class]:
    """Return the Function classes of a module by name; an empty mapping if it has none.

    Args:
        module: The module.
        inside: True to include the imported modules of a package.
    """
    found: dict[str, Class] = {}
    for known in modules_of(module, inside=inside):
        prefix = f"{known.__name__.removeprefix(module.__name__)}.".removeprefix(".")
        _collect(vars(known), prefix, known.__name__, found, set())
    return found


def modules_of(module: ModuleType, *, inside: bool) -> list[ModuleType]:
    """Return a module and, if `inside`, the imported modules of the package."""
    if not inside:
        return [module]
    prefix = f"{module.__name__}."
    return [module, *(known for name, known in sorted(sys.modules.items()) if name.startswith(prefix))]


def _collect(names: Any, prefix: str, module: str, found: dict[str, Class], seen: set[type]) -> None:
    for name, value in list(names.items()):
        if not isinstance(value, type) or value.__module__ != module or value in seen:
            continue
        seen.add(value)
        if issubclass(value, torch.autograd.Function):
            found[f"{prefix}{name}"] = value
        _collect(vars(value), f"{prefix}{name}.", module, found, seen)


def _named(module: ModuleType, name: str) -> Class:
    value = attribute_of(module, name)
    if is_function_class(value):
        return value
    known: dict[str, Class] = {}
    _collect(vars(module), "", module.__name__, known, set())
    available = ", ".join(f"`{each}`" for each in known)
    raise errors.OperatorNotFoundError(
        f"`{_location(module)}` has no `autograd.Function` named `{name}`"
        if value is None
        else f"`{name}` of `{_location(module)}` is not an `autograd.Function`",
        expected=f"one of {available}" if available else "an `autograd.Function`; the file has none",
        hint="name the class as the file does; write a nested class as `Outer.Inner`",
    )


def attribute_of(module: ModuleType, name: str) -> Any:
    """Return an attribute of a module, with dots in nested names; None if there is none."""
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _location(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or module.__name__


_NAME = re.compile(r"(?P<space>[^\W\d]\w*)::(?P<name>[^\W\d]\w*)(?:\.(?P<overload>\w+))?")


def custom_ops_in(module: ModuleType, *, inside: bool = False) -> dict[str, Any]:
    """Return the `custom_op` objects of a module by the variable's name, in the order of the file.

    Imported objects, and objects that opsmith has adopted, are left out.

    Args:
        module: The module.
        inside: True to include the imported modules of a package.
    """
    found: dict[str, Any] = {}
    for known in modules_of(module, inside=inside):
        prefix = f"{known.__name__.removeprefix(module.__name__)}.".removeprefix(".")
        for name, value in list(vars(known).items()):
            if not is_custom_op(value) or any(value is other for other in found.values()):
                continue
            if _is_of(value, known) and not _is_adopted(value):
                found[f"{prefix}{name}"] = value
    return found


def _is_of(custom_op: Any, module: ModuleType) -> bool:
    """Return True if the function of a custom op is defined in a module, or torch does not expose it."""
    if not capabilities.on("library_operators"):
        return True
    function = custom_function(custom_op)
    return function is None or getattr(function, "__module__", None) == module.__name__


def _is_adopted(custom_op: Any) -> bool:
    declared = declared_operators()
    return bool(declared) and capabilities.on("library_operators") and name_of(custom_op) in _names(declared)


def _names(operators: Iterable[Operator[..., Any]]) -> set[str]:
    return {operator.name for operator in operators}


def registered_as(name: str) -> Any:
    """Return the operator of torch.library of this name, `namespace::name`; None if there is none.

    Example:
        >>> registered_as("aten::no_such_operator") is None
        True
    """
    found = _NAME.fullmatch(name)
    if found is None or name in _names(declared_operators()):
        return None
    value = getattr(getattr(torch.ops, found["space"]), found["name"], None)
    if found["overload"] is not None:
        value = getattr(value, found["overload"], None)
    return value if value is not None and is_operator(value) else None
