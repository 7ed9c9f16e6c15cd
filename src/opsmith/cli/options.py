"""Options that several commands have, and that mean the same in each."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from opsmith import errors
from opsmith.locating import Target

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show where an error comes from.")]
Operators = Annotated[
    str,
    typer.Argument(
        metavar="FILE_OR_MODULE[:NAME]",
        help="A `.py` file or a module, and which of its operators; all of them without `:NAME`.",
        show_default=False,
    ),
]


def effort_of(*, quick: bool, thorough: bool) -> str:
    """The effort that `--quick` and `--thorough` ask for.

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
    """What `[FILE_OR_MODULE:]NAME` names, in a target's own place or in the one that it names.

    Args:
        text: The option's value; the name may have dots.
        target: Where it is looked for if it names no place.
        what: What to call it in a message, as `samples`.
        expected: What it is to be.
        hint: What to write if it is not there; `{name}` stands for the name.

    Raises:
        OperatorNotFoundError: If there is no such name.
    """
    place, _, name = text.rpartition(":")
    value: Any = (Target.of(place) if place else target).module()
    for part in name.split("."):
        value = getattr(value, part, None)
    if value is None:
        raise errors.OperatorNotFoundError(
            f"`{place or target.place}` has {what} named `{name}`",
            expected=expected,
            hint=hint.format(name=name),
        )
    return value
