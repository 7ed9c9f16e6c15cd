"""Attributes of nodes: arguments of a call, and saved values of autograd's nodes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from opsmith.core.operator import Operator
from opsmith.core.tensors import named_tensors, nested_tensors
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.formula_rule import recorded_operator
from opsmith.torch_library.torch_messages import GRAPH_FREED, has_message

LONGEST = 60
"""Largest length of a value's text."""


def arguments_of(
    function: Any, operator: Operator[..., Any] | None, args: Any, kwargs: Mapping[str, Any]
) -> tuple[list[tuple[str, Tensor]], tuple[tuple[str, str], ...]]:
    """The tensors of a call, each with the name of its argument if known, and the remaining arguments."""
    named = [*zip(_positional(function, operator, len(args)), args, strict=True), *kwargs.items()]
    tensors = [each for name, value in named for each in named_tensors(value, name)]
    others = [
        (name or f"argument {position}", short_text(value))
        for position, (name, value) in enumerate(named)
        if value is not None and not any(True for _ in named_tensors(value))
    ]
    return tensors, tuple(others)


def _positional(function: Any, operator: Operator[..., Any] | None, count: int) -> list[str]:
    """Names of the positional arguments; empty for a function in C."""
    if operator is not None:
        names = list(operator.specification.schema.names)
    else:
        names = _parameters(function) if inspect.isfunction(function) else []
    return [*names, *[""] * count][:count]


def _parameters(function: Any) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:  # a wrapper of a function in C has no signature
        return []


def short_text(value: Any) -> str:
    """A value as text of one line.

    Example:
        >>> import torch
        >>> short_text(torch.float32), short_text((1, 2)), short_text("a" * 100)[-5:]
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
"""Smallest integer that is negative: torch stores integers without a sign, -1 as 2**64 - 1."""


def recorded_attributes(node: Any) -> tuple[tuple[str, str], ...]:
    """The saved values of autograd's node that are not tensors: attributes that begin with `_saved_`."""
    found = []
    prefix = "_saved_"
    names = dir(node)
    for name in names:
        if name.startswith(prefix) and f"_raw{name}" not in names:
            value = getattr(node, name)
            if isinstance(value, tuple):
                value = tuple(map(_signed, value))
            found.append((name.removeprefix(prefix).replace("_sym_", "_"), short_text(_signed(value))))
    return tuple(found)


def _signed(value: Any) -> Any:
    wrapped = isinstance(value, int) and not isinstance(value, bool) and value >= _WRAPPED
    return value - 2 * _WRAPPED if wrapped else value


def saved_values(node: Any) -> dict[str, Any] | None:
    """The tensors that a node saved, by name; None if they were freed."""
    try:
        return capabilities.saved_tensors(node)
    except RuntimeError as error:
        if not has_message(error, GRAPH_FREED):
            raise
        return None


def context_tensors(node: Any) -> dict[str, Tensor]:
    """Tensors that the `forward` of a Function has set as attributes of its `ctx`, by name.

    They live as long as the graph; a backward does not free them. The `ctx` of an operator belongs to
    opsmith, and is left out.
    """
    if recorded_operator(node) is not None:
        return {}
    found = {}
    for name, value in getattr(node, "__dict__", {}).items():
        several = list(nested_tensors(value))
        for number, tensor in enumerate(several):
            found[f"ctx.{name}" + (f"[{number}]" if len(several) > 1 else "")] = tensor
    return found


def leaf_of(node: Any) -> Tensor | None:
    """The leaf of an AccumulateGrad node; None for any other node.

    The class name identifies the node, since any Function may have an attribute `variable` on its context.

    Example:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> made = x.exp().grad_fn
        >>> leaf_of(made), leaf_of(made.next_functions[0][0]) is x
        (None, True)
    """
    if type(node).__name__ != "AccumulateGrad":
        return None
    leaf: Tensor = node.variable
    return leaf
