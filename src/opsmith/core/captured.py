"""Tensors that a function reaches without taking them as arguments: their gradients would be lost."""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from opsmith import errors
from opsmith.core.location import where


def refuse_captured(function: Callable[..., Any], operator: str) -> None:
    """Refuse a reference that closes over a tensor, or a module, that requires a gradient.

    An operator is a function of its arguments; autograd sees nothing else.

    Raises:
        CapturedTensorError: Naming what is captured.
    """
    for name, value in _reached(function):
        parameters = value.parameters() if isinstance(value, torch.nn.Module) else [value]
        if any(isinstance(each, torch.Tensor) and each.requires_grad for each in parameters):
            raise errors.CapturedTensorError(
                f"it uses `{name}`, which requires a gradient and is no argument",
                operator=operator,
                argument=name,
                expected="a function of its arguments alone",
                got=type(value).__name__,
                where=where(function),
                hint=f"make it an argument, `{name}: Tensor`, or use `{name}.detach()` made outside",
            )


def _reached(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Names and values of the closure, and of the globals that the code really loads."""
    if not isinstance(function, types.FunctionType):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in _globals_of(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _globals_of(code: types.CodeType) -> set[str]:
    names = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _globals_of(constant)
    return names
