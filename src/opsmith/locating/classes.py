"""The Function classes of a module: those that its own file defines, at its top level or inside classes."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

from opsmith import errors

Class = type[torch.autograd.Function]


def classes_of(module: ModuleType, name: str | None = None, *, inside: bool = False) -> dict[str, Class]:
    """The classes by the name under which the module holds them, in the order of the file.

    A class counts where its module is this one, so that what is imported does not; what a factory of this
    file made counts, under the variable that holds it.

    Args:
        module: The module.
        name: The one class to find, which may come from elsewhere; nested names have dots.
        inside: Whether the modules inside a package count, too.

    Raises:
        OperatorNotFoundError: If there is none, or none of this name.

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
            f"`{_place(module)}` defines no `autograd.Function`",
            hint="name the file that defines some: what a file imports, or makes inside of functions, does "
            "not count",
        )
    return found


def classes_in(module: ModuleType, *, inside: bool = False) -> dict[str, Class]:
    """The same, and nothing where there are none.

    Args:
        module: The module.
        inside: Whether the modules inside a package count, too.
    """
    found: dict[str, Class] = {}
    for known in modules_of(module, inside=inside):
        prefix = f"{known.__name__.removeprefix(module.__name__)}.".removeprefix(".")
        _collect(vars(known), prefix, known.__name__, found, set())
    return found


def modules_of(module: ModuleType, *, inside: bool) -> list[ModuleType]:
    """A module, and where asked for those inside it that are imported."""
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
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part, None)
    if isinstance(value, type) and issubclass(value, torch.autograd.Function):
        return value
    known: dict[str, Class] = {}
    _collect(vars(module), "", module.__name__, known, set())
    there = ", ".join(f"`{each}`" for each in known)
    raise errors.OperatorNotFoundError(
        f"`{_place(module)}` has no `autograd.Function` named `{name}`"
        if value is None
        else f"`{name}` of `{_place(module)}` is no `autograd.Function`",
        expected=f"one of {there}" if there else "an `autograd.Function`; it has none",
        hint="name the class as the file does, one inside of another with a dot: `Outer.Inner`",
    )


def _place(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or module.__name__
