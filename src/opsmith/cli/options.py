"""Options that commands share, the objects and files that they name, and option names in messages."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import torch
import typer
from typer.models import OptionInfo

from opsmith import errors
from opsmith.core.operator import Operator
from opsmith.targets import Target

T = TypeVar("T")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, also for an error.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Print the traceback of an error.")]
Quick = Annotated[bool, typer.Option("--quick", help="Check less: about 2 seconds for each operator.")]
Thorough = Annotated[bool, typer.Option("--thorough", help="Check more: more inputs, more repeats; minutes.")]
Seed = Annotated[int, typer.Option(help="Seed of all random numbers: the same seed, the same report.")]
Operators = Annotated[
    str,
    typer.Argument(
        metavar="FILE_OR_MODULE[:NAME]",
        help="A `.py` file or a module, with the name of one operator; without `:NAME`, all its operators.",
    ),
]


def effort_of(*, quick: bool, thorough: bool) -> str:
    """Return the effort of `--quick` and `--thorough`.

    Raises:
        UsageError: If both are given.
    """
    if quick and thorough:
        raise errors.UsageError(
            "`--quick` and `--thorough` contradict each other",
            expected="one of them, or none",
            got="both",
            hint="leave one of them out",
        )
    return "quick" if quick else "thorough" if thorough else "default"


def value_named(text: str, target: Target, *, what: str, expected: str, hint: str) -> Any:
    """Return the object that `[FILE_OR_MODULE:]NAME` names.

    Args:
        text: Value of the option; the name may have dots.
        target: The target whose module is searched if the value names no module. what: Start of the message
            `{what} named ...`, such as `no samples`.
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
        raise _without_arguments(f"`{text}` is a model", target.name, purpose)
    if isinstance(value, torch.Tensor):
        return value, None, None
    if not callable(value) or isinstance(value, Operator | type):
        return target.operators()[0], None, None
    try:
        inspect.signature(value).bind()
    except TypeError as error:
        raise errors.UsageError(
            f"`{text}` cannot be called without arguments: {error}",
            expected=f"a function without arguments that returns the object to {purpose}",
            got=f"it takes `{inspect.signature(value)}`",
            hint=f"write a function that calls it, `def {purpose}_it(): ...`, and name this function",
        ) from error
    except ValueError:  # a function in C without a signature
        pass
    made = value()
    if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], torch.nn.Module | Operator):
        return made[0], made[1], made[2] if len(made) == 3 else None
    if isinstance(made, torch.nn.Module):
        raise _without_arguments(f"`{text}` returns a model", f"{target.name}()", purpose)
    return made, None, None


def _without_arguments(problem: str, model: str, purpose: str) -> errors.UsageError:
    """Make the error for a model without arguments.

    Args:
        problem: Start of the message.
        model: Code of the model.
        purpose: The purpose of the command.
    """
    return errors.UsageError(
        f"{problem}, and its arguments are missing",
        expected="a function that returns a model and its arguments",
        hint=f"write `def {purpose}_it(): return {model}, (torch.zeros(1, 3, 32, 32),)`, and name it",
    )


def read_file(file: Path, option: str, command: str, read: Callable[[bytes, Path], T]) -> T:
    """Read a file that another command writes.

    Args:
        file: The file.
        option: The option that names it, for messages: `--against`.
        command: The command, up to the name of the file. read: Function that reads the content; its second
            argument is the file, for messages.

    Raises:
        UsageError: If it cannot be read.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise errors.UsageError(
            f"`{file}` cannot be read",
            argument=option,
            expected=f"a file that `{command} FILE` writes",
            got=error.strerror or str(error),
            hint=f"make this file first: `{command} {file}`",
        ) from error
    return read(content, file)


def refuse_unrelated(
    file: Path, option: str, results: Mapping[str, T], names: Sequence[str], kind: str
) -> None:
    """Raise an error for a file that has no results of these operators.

    Args:
        file: The file.
        option: The option that names it, for messages.
        results: Its content, by operator.
        names: Names of the operators.
        kind: Kind of the content, for the message: `report`.

    Raises:
        UsageError: If it has no results of them.
    """
    if not results.keys() & {*names}:
        raise errors.UsageError(
            f"`{file}` has no {kind} of these operators",
            argument=option,
            expected=f"one of {', '.join(f'`{name}`' for name in names)}",
            got=", ".join(f"`{name}`" for name in results) or f"no {kind} at all",
            hint=f"name a file with a {kind} of these operators, or leave the option out",
        )


@contextmanager
def named_as_options(command: Callable[..., None]) -> Iterator[None]:
    """Context manager in which errors name options of a command instead of arguments of a function.

    Args:
        command: The function of the command.
    """
    try:
        yield
    except errors.OpsmithError as error:
        options = _options(command)
        texts = {name: getattr(error, name) for name in ("problem", "expected", "got", "hint")}
        said = {name: text and _in_options(text, command.__name__, options) for name, text in texts.items()}
        argument = error.argument
        if isinstance(error, errors.UsageError) and argument in options:
            argument = _spelled(options[argument])
            said["problem"] = said["problem"].replace(f"`{error.argument}`", f"`{argument}`")
        if said == texts and argument == error.argument:
            raise
        raise type(error)(**said, operator=error.operator, argument=argument, where=error.where) from error


def in_options(text: str, command: Callable[..., None]) -> str:
    """Replace arguments of a function in a text by the options of a command.

    Args:
        text: The text; code is between backticks.
        command: The function of the command. Code that calls a function with the command's name is replaced
            as well.

    Example:
        >>> def tidy(samples: Annotated[str, typer.Option("--samples", metavar="NAME")]) -> None: ...
        >>> in_options("give `samples=`, or call `tidy(..., samples=[(x, 2.0)])`", tidy)
        'give `--samples`, or give `--samples NAME`'
    """
    return _in_options(text, command.__name__, _options(command))


_BACKTICKS = re.compile(r"(?P<verb>call )?`(?P<code>[^`]+)`")


def _in_options(text: str, command: str, options: Mapping[str, tuple[str, OptionInfo]]) -> str:
    def replaced(found: re.Match[str]) -> str:
        keywords = _keywords(found["code"], command)
        if not keywords or not keywords.keys() <= options.keys():
            return found[0]
        written = " ".join(_spelled(options[name], value) for name, value in keywords.items())
        return f"{'give ' if found['verb'] else ''}`{written}`"

    return _BACKTICKS.sub(replaced, text)


def _keywords(code: str, command: str) -> dict[str, ast.expr | None]:
    """Return the keyword arguments in code: `a=1`, `a=` or `command(..., a=1)`; none for other code."""
    if re.fullmatch(r"\w+=", code):
        return {code[:-1]: None}
    for text in (f"{command}({code})", code):
        try:
            call = ast.parse(text, mode="eval").body
        except SyntaxError:
            continue
        if (
            isinstance(call, ast.Call)
            and ast.unparse(call.func).removeprefix("opsmith.") == command
            and (text is code or not call.args)
        ):
            return {each.arg: each.value for each in call.keywords if each.arg is not None}
    return {}


def _options(command: Callable[..., None]) -> dict[str, tuple[str, OptionInfo]]:
    """Return the options of a command by the name of the argument; one of `sizes` may be `--size`."""
    found: dict[str, tuple[str, OptionInfo]] = {}
    for name, annotation in get_type_hints(command, include_extras=True).items():
        for each in getattr(annotation, "__metadata__", ()):
            if isinstance(each, OptionInfo):
                found |= dict.fromkeys([name, f"{name}s"], (name, each))
    return found


def _spelled(option: tuple[str, OptionInfo], value: ast.expr | None = None) -> str:
    """Return an option as it is written, with a value if there is one."""
    name, known = option
    written = [each for each in known.param_decls or () if each.startswith("--")]
    on, _, off = (written[0] if written else f"--{name.replace('_', '-')}").partition("/")
    if value is None:
        return on
    if not isinstance(value, ast.Constant) or value.value is Ellipsis:
        return f"{on} {known.metavar or name.upper()}"
    if isinstance(value.value, bool):
        return on if value.value else off or f"--no{on[1:]}"
    return f"{on} {value.value!s}"
