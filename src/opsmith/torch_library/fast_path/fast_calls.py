"""The fast paths of one operator that torch calls: those of `torch.ops` and of the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from opsmith.core.operator import without_missing
from opsmith.core.schema import Schema
from opsmith.torch_library import capabilities

NOT_TAKEN = object()
"""Result of a fast path in the dispatcher for a call that it does not take."""

FastCall = Callable[..., Any]


def _not_taken(*_args: Any, **_kwargs: Any) -> Any:
    return NOT_TAKEN


class FastCalls:
    """Fast paths of `torch.ops.namespace.name` and of the dispatcher, installed after the first valid call.

    Args:
        operators: `torch.ops.namespace.name` and its overload.

    Attributes:
        installed: True if they are installed, or there are none.
        from_dispatcher: Takes None and the arguments of a call; returns `NOT_TAKEN` for the slow path.
    """

    def __init__(self, *operators: Any) -> None:
        self._operators = operators
        self.installed = False
        self.from_dispatcher: FastCall = _not_taken

    def install(
        self, make: Callable[[FastCall, FastCall | None], FastCall | None] | None, schema: Schema
    ) -> None:
        """Install the fast paths.

        Args:
            make: Generates a fast path from the slow path, and from the one used while torch compiles; None
                for an operator without a fast path.
            schema: The operator's signature.
        """
        self.installed = True
        if make is None or not capabilities.on("fast_path"):
            return
        self.from_dispatcher = make(_not_taken, _not_taken) or _not_taken
        for operator in self._operators:
            through = capabilities.direct_call(operator)
            fast_call = make(partial(_slow_path, through, schema), through)
            if fast_call is not None:
                capabilities.override_call(operator, fast_call)

    def uninstall(self) -> None:
        """Restore torch's own calls."""
        if self.installed and capabilities.on("fast_path"):
            for operator in self._operators:
                capabilities.override_call(operator, None)
        self.installed, self.from_dispatcher = False, _not_taken


def _slow_path(
    through: FastCall, schema: Schema, _operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call of `torch.ops` that the fast path does not take."""
    given, named = without_missing(schema.names, args, kwargs)
    if schema.spreads and schema.lowering is not None:
        given, named = schema.lowering.call(given, named)  # a default may be one number for several
    return through(*given, **named)
