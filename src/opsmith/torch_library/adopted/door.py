"""The front door of an adopted class: a plain call goes to its forward with nothing in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opsmith.core.adopted import Adopted
from opsmith.core.calls import requires_gradient
from opsmith.core.kinds import Kind
from opsmith.torch_library import capabilities
from opsmith.torch_library.adopted.fallback import stand_ins
from opsmith.torch_library.adopted.forward import run_forward
from opsmith.torch_library.effects import foreign_kind
from opsmith.torch_library.flattening import Flattening
from opsmith.torch_library.operator_call import OperatorCall, Registered


def adopted_door(registered: Registered, adopted: Adopted, call: Callable[..., Any]) -> Callable[..., Any]:
    """The `__call__` of a handle for calls of plain tensors, with no mode or transform active.

    Args:
        registered: The operator.
        adopted: Its class.
        call: Takes the handle, positional and keyword arguments: the call that is right in every case.
    """
    schema = adopted.schema
    kinds = [(argument.name, argument.kind) for argument in schema.arguments]

    def taken(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """The argument values, where this is a call for the door."""
        args, kwargs = adopted.completed(args, kwargs)
        if len(args) > schema.positional or not schema.by_name.keys() >= kwargs.keys():
            return None
        if kwargs and any(name in kwargs for name in schema.names[: len(args)]):
            return None  # given twice
        values = schema.call_values(args, kwargs)
        plain = all(_fits(kind, value) for (_, kind), value in zip(kinds, values, strict=True))
        return values if plain and stand_ins(values) is None else None

    def door(handle: Any, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not capabilities.nothing_active():
            return call(handle, args, kwargs)
        values = taken(args, kwargs)
        if values is None:
            return call(handle, args, kwargs)
        if not torch.is_grad_enabled() or not requires_gradient(values):
            with torch.no_grad():
                return adopted.structured(run_forward(adopted, values).results)
        flattening = Flattening.of(schema, values)
        target = OperatorCall(registered, flattening)
        return adopted.structured(registered.node.apply(target, False, *flattening.flatten(values)))

    return door


def _fits(kind: Kind, value: Any) -> bool:
    """Whether a value is of its kind as it is, and no tensor that operators do not take."""
    if isinstance(value, Tensor):
        return kind.is_tensor and not kind.sequence and foreign_kind(value) is None
    if kind.base.schema == "float" and isinstance(value, int):
        return False  # the dispatcher makes a float of it
    return kind.accepts(value) and not (kind.is_tensor and any(foreign_kind(each) for each in value or ()))
