"""The generated doors of a registered operator: for calls of `torch.ops` and of the dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from opsmith.core.operator import without_missing
from opsmith.torch_library import capabilities

NOT_TAKEN = object()
"""What the door answers to the dispatcher for a call that it does not take."""

Door = Callable[..., Any]


def _not_taken(*_args: Any, **_kwargs: Any) -> Any:
    return NOT_TAKEN


class Doors:
    """Doors that open after the first call has been through the dispatcher without fault.

    Args:
        operators: `torch.ops.namespace.name` and its overload.

    Attributes:
        opened: Whether they are open, or have been looked for.
        dispatched: Takes None and the arguments of a call; returns `NOT_TAKEN` for one that is none for it.
    """

    def __init__(self, *operators: Any) -> None:
        self._operators = operators
        self.opened = False
        self.dispatched: Door = _not_taken

    def open(self, make: Callable[[Door, Door | None], Door | None] | None, names: Sequence[str]) -> None:
        """Answer calls as those of the handle are answered.

        Args:
            make: Makes a door from who takes the other calls, and who takes them while torch compiles; None
                for an operator that has no doors.
            names: The arguments' names.
        """
        self.opened = True
        if make is None or not capabilities.on("front_door"):
            return
        self.dispatched = make(_not_taken, None) or _not_taken
        for operator in self._operators:
            through = capabilities.direct_call(operator)
            door = make(partial(_passed_on, through, names), through)
            if door is not None:
                capabilities.answer_calls(operator, door)

    def close(self) -> None:
        """Let torch answer again."""
        if self.opened and capabilities.on("front_door"):
            for operator in self._operators:
                capabilities.answer_calls(operator, None)
        self.opened, self.dispatched = False, _not_taken


def _passed_on(
    through: Door, names: Sequence[str], _operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A call of `torch.ops` that the door does not take."""
    given, named = without_missing(names, args, kwargs)
    return through(*given, **named)
