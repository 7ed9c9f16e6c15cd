"""The arguments of a call: tensors with their names, the rest as text."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from opsmith.core.operator import Operator

LONGEST = 60
"""Letters of a value that are shown."""


def arguments_of(
    function: Any, operator: Operator[..., Any] | None, args: Any, kwargs: Mapping[str, Any]
) -> tuple[list[tuple[str, Tensor]], tuple[tuple[str, str], ...]]:
    """The tensors of a call, each with the name of its argument if known, and its other arguments."""
    named = [*zip(_positional(function, operator, len(args)), args, strict=True), *kwargs.items()]
    tensors = [each for name, value in named for each in _tensors(name, value)]
    others = [
        (name or f"argument {position}", shown(value))
        for position, (name, value) in enumerate(named)
        if value is not None and not any(True for _ in _tensors("", value))
    ]
    return tensors, tuple(others)


def _positional(function: Any, operator: Operator[..., Any] | None, count: int) -> list[str]:
    """Names of the first arguments; empty where a function in C does not tell."""
    if operator is not None:
        names = list(operator.specification.schema.names)
    else:
        names = _parameters(function) if inspect.isfunction(function) else []
    return [*names, *[""] * count][:count]


def _parameters(function: Any) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:  # around a function in C, which has none
        return []


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(f"{name}[{key!r}]" if name else "", each)
    elif isinstance(value, list | tuple):
        for position, each in enumerate(value):
            yield from _tensors(f"{name}[{position}]" if name else "", each)


def shown(value: Any) -> str:
    """A value as text that fits into a line.

    Example:
        >>> import torch
        >>> shown(torch.float32), shown((1, 2)), shown("a" * 100)[-5:]
        ('float32', '(1, 2)', 'aaaa…')
    """
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, str):
        text = repr(value)
    elif isinstance(value, int | float | complex | bool | None | list | tuple | torch.device):
        text = str(value)
    else:
        text = type(value).__name__ if not callable(value) else getattr(value, "__name__", repr(value))
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


_WRAPPED = 2**63
"""torch keeps whole numbers without a sign: -1 is 2**64 - 1."""


def recorded_attributes(node: Any) -> tuple[tuple[str, str], ...]:
    """What autograd's node keeps beside tensors: attributes that begin with `_saved_`, as torch says."""
    found = []
    prefix = "_saved_"
    names = dir(node)
    for name in names:
        if name.startswith(prefix) and f"_raw{name}" not in names:
            value = getattr(node, name)
            if isinstance(value, tuple):
                value = tuple(map(_signed, value))
            found.append((name.removeprefix(prefix).replace("_sym_", "_"), shown(_signed(value))))
    return tuple(found)


def _signed(value: Any) -> Any:
    wrapped = isinstance(value, int) and not isinstance(value, bool) and value >= _WRAPPED
    return value - 2 * _WRAPPED if wrapped else value
