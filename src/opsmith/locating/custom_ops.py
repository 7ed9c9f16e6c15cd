"""The operators of torch.library that a file makes: `custom_op` objects that its variables hold."""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch

from opsmith.adopting.registered import custom_function, is_custom_op, is_operator, name_of
from opsmith.core.operator import Operator
from opsmith.declaring import declared_operators
from opsmith.locating.classes import modules_of
from opsmith.torch_library import capabilities

_NAME = re.compile(r"(?P<space>[^\W\d]\w*)::(?P<name>[^\W\d]\w*)(?:\.(?P<overload>\w+))?")


def custom_ops_in(module: ModuleType, *, inside: bool = False) -> dict[str, Any]:
    """The `custom_op` objects by the variable that holds them, in the order of the file.

    One counts where its function was written in this module, so that what is imported does not; those that
    opsmith has adopted are left out.

    Args:
        module: The module.
        inside: Whether the modules inside a package count, too.
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
    """Whether its function was written in a module; yes where torch does not tell, so that it is not lost."""
    if not capabilities.on("registered"):
        return True
    function = custom_function(custom_op)
    return function is None or getattr(function, "__module__", None) == module.__name__


def _is_adopted(custom_op: Any) -> bool:
    declared = declared_operators()
    return bool(declared) and capabilities.on("registered") and name_of(custom_op) in _names(declared)


def _names(operators: Iterable[Operator[..., Any]]) -> set[str]:
    return {operator.name for operator in operators}


def registered_as(name: str) -> Any:
    """The operator of torch.library that has this name, `namespace::name`; None where there is none.

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
