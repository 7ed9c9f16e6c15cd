"""Options of several commands, the objects and the files that they name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer

from opsmith import errors
from opsmith.core.operator import Operator
from opsmith.targets import Target

T = TypeVar("T")

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


def subject_named(text: str, purpose: str) -> tuple[Any, Any, Any]:
    """Return the object that `FILE_OR_MODULE:NAME` names, its positional and its keyword arguments.

    A function is called. A model or an operator that it returns comes with its arguments, as `(model, args)`
    or `(model, args, kwargs)`; other objects come without arguments.

    Args:
        text: The target.
        purpose: The purpose of the command, for messages: `draw`.

    Raises:
        UsageError, OperatorNotFoundError, ModuleImportError: If the target has no such object.
    """
    target = Target.of(text)
    if target.name is None:
        raise errors.UsageError(
            f"`{text}` must name an object to {purpose}",
            expected="FILE_OR_MODULE:NAME",
            hint=f"name an operator, or a function that returns a model and its arguments: `{text}:model`",
        )
    value = getattr(target.module(), target.name, None)
    if isinstance(value, torch.nn.Module):
        raise errors.UsageError(
            f"`{text}` is a model, and its arguments are missing",
            expected="a function that returns a model and its arguments",
            hint=f"write `def {purpose}_it(): return {target.name}, (torch.zeros(1, 3, 32, 32),)`, and name "
            "that",
        )
    if isinstance(value, torch.Tensor):
        return value, None, None
    if not callable(value) or isinstance(value, Operator | type):
        return target.operators()[0], None, None
    try:
        inspect.signature(value).bind()
    except TypeError as error:
        raise errors.UsageError(
            f"`{text}` cannot be called without arguments: {error}",
            expected=f"a function without arguments that returns what to {purpose}",
            got=f"it takes `{inspect.signature(value)}`",
            hint=f"write a function that calls it, `def {purpose}_it(): ...`, and name that",
        ) from error
    except ValueError:  # a function in C without a signature
        pass
    made = value()
    if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], torch.nn.Module | Operator):
        return made[0], made[1], made[2] if len(made) == 3 else None
    return made, None, None


def read_file(file: Path, command: str) -> str:
    """Return the text of a file that another command writes.

    Args:
        file: The file.
        command: The command, up to the name of the file.

    Raises:
        UsageError: If it cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise errors.UsageError(
            f"`{file}` cannot be read",
            expected=f"what `{command} FILE` writes",
            got=getattr(error, "strerror", None) or str(error),
            hint=f"make it first: `{command} {file}`",
        ) from error


def refuse_unrelated(file: Path, results: Mapping[str, T], names: Sequence[str], kind: str) -> None:
    """Refuse a file that has results of none of these operators.

    Args:
        file: The file.
        results: Its content, by operator.
        names: Names of the operators.
        kind: Kind of the content, for the message: `report`.

    Raises:
        UsageError: If it has none.
    """
    if not results.keys() & {*names}:
        raise errors.UsageError(
            f"`{file}` has no {kind} of these operators",
            expected=f"one of {', '.join(f'`{name}`' for name in names)}",
            got=", ".join(f"`{name}`" for name in results) or f"no {kind} at all",
            hint="name the file that has it, or leave it out",
        )
