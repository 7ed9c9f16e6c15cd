"""What authors attach has to be a function that can be called as the operator is."""

from __future__ import annotations

import inspect
from typing import Any

from opsmith import errors
from opsmith.core.calls import shown
from opsmith.core.location import where
from opsmith.core.schema import Schema


def check_attached(function: Any, what: str, schema: Schema, operator: str) -> None:
    """Refuse a kernel, fake kernel or stand-in that does not take the operator's arguments.

    Args:
        function: What is attached; a builtin without a signature is taken at its word.
        what: What it is, in messages.
        schema: The operator's signature.
        operator: The operator's name.

    Raises:
        NotAFunctionError: Saying which arguments it has to take.
    """
    names = ", ".join(f"`{name}`" for name in schema.names)
    if not callable(function):
        raise errors.NotAFunctionError(
            f"{what} is not a function",
            operator=operator,
            expected=f"a function of {names}",
            got=shown(function),
            hint=f"write `def f({', '.join(schema.names)}): ...`",
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    keywords = dict.fromkeys(schema.names[schema.positional :])
    try:
        signature.bind(*schema.names[: schema.positional], **keywords)
    except TypeError as error:
        raise errors.NotAFunctionError(
            f"{what} cannot be called as the operator is: {error}",
            operator=operator,
            expected=f"a function of {names}",
            got=f"{getattr(function, '__name__', 'a function')}{signature}",
            where=where(function),
            hint=f"write `def f({', '.join(schema.names)}): ...`, even if it uses only some",
        ) from error
