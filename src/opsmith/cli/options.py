"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from opsmith import errors
from opsmith.targets import Target

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Print the traceback of an error.")]
Operators = Annotated[
    str,
    typer.Argument(
        metavar="FILE_OR_MODULE[:NAME]",
        help="A `.py` file or a module, with the name of one operator; without `:NAME`, all its operators.",
        show_default=False,
    ),
]


def effort_of(*, quick: bool, thorough: bool) -> str:
    """Return the effort of `--quick` and `--thorough`.

    Raises:
        UsageError: If both are given.
    """
    if quick and thorough:
        raise errors.UsageError(
            "`--quick` and `--thorough` are opposites",
            expected="one of them, or none",
            got="both",
            hint="leave one of them out",
        )
    return "quick" if quick else "thorough" if thorough else "default"


def value_named(text: str, target: Target, *, what: str, expected: str, hint: str) -> Any:
    """Return the object that `[FILE_OR_MODULE:]NAME` names.

    Args:
        text: Value of the option; the name may have dots.
        target: The target whose module is searched if the value names none.
        what: Start of the message `{what} named ...`, as `no samples`.
        expected: The expected kind of object, for the message.
        hint: Hint of the message; `{name}` stands for the name.

    Raises:
        OperatorNotFoundError: If there is no such name.
    """
    source, _, name = text.rpartition(":")
    value: Any = (Target.of(source) if source else target).module()
    for part in name.split("."):
        value = getattr(value, part, None)
    if value is None:
        raise errors.OperatorNotFoundError(
            f"`{source or target.source}` has {what} named `{name}`",
            expected=expected,
            hint=hint.format(name=name),
        )
    return value
