"""An operator of torch.library under check: it is described as torch knows it, and changed in nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opsmith.adopting.matching import described
from opsmith.adopting.registered import overload_of
from opsmith.checking.mistakes import calls_operator
from opsmith.core.location import where
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.foreign import own_of


def as_specification(operator: Any) -> tuple[Specification, Callable[..., Any]]:
    """A specification in which the operator stands for its own reference, and what calls it.

    Args:
        operator: `torch.ops.ns.name`, one of its overloads, or a `torch.library.custom_op`.

    Raises:
        UsageError: If it has several overloads, or is one of torch's own.
        UnsupportedTypeError: If its schema has types that opsmith does not know.
    """
    overload = overload_of(operator)
    signature = capabilities.signature_of(overload)
    schema = described(signature)

    @calls_operator
    def call(*args: Any, **kwargs: Any) -> Any:
        given, named = schema.dispatched(schema.call_values(args, kwargs))
        return overload(*given, **named)

    specification = Specification(
        name=signature.name,
        reference=call,
        schema=schema,
        module=__name__,
        qualname=signature.name,
        where=_where(overload),
        opaque=True,
        random=torch.Tag.nondeterministic_seeded in overload.tags,
        inline=False,
        own=own_of(overload),
    )
    return specification, call


def _where(overload: Any) -> str:
    """`file:line` of what computes it, where that is Python; else its name."""
    parts = capabilities.custom_parts(overload)
    return str(overload) if parts is None else where(parts.function)
