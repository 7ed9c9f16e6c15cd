"""Parts of opsmith that other packages may write: their exceptions and wrong results become clear errors."""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import repeat
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from opsmith import errors
from opsmith.core.location import innermost, where

GROUP = "opsmith.languages"
"""Group of entry points, such as `helion = "opsmith_helion:LANGUAGE"`."""
SHOWN = 200
"""Maximum number of characters of a wrong value, or of an exception, in a message."""


class GuardedPart:
    """Base of the parts of a kernel language.

    In a class of another package, each method of this part calls the author's method in a guard. An exception
    that is not an error of opsmith, or a result that does not fit its annotation, becomes a `LanguageError`.
    Values of the class are compared with its annotations when the class is defined.

    Attributes:
        of_a_package: True in a class of another package.
    """

    of_a_package: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__module__.partition(".")[0] == __name__.partition(".")[0]:
            return
        part = next(each for each in cls.__mro__ if GuardedPart in each.__bases__)
        hints = _hints(part)
        for name, given in [*vars(cls).items()]:
            if name not in hints or name == "__call__":
                continue
            guard = functools.partial(_guarded, cls, name, hints[name])
            if isinstance(given, property) and given.fget is not None:
                setattr(cls, name, given.getter(guard(given.fget)))
            elif isinstance(given, classmethod | staticmethod):
                setattr(cls, name, type(given)(guard(given.__func__)))
            elif inspect.isfunction(given):
                setattr(cls, name, guard(given))
            else:
                _refuse_misfit(given, hints[name], cls, name)
        cls.of_a_package = True

    @classmethod
    def named_types(cls) -> Mapping[str, Any]:
        """Return the types in its annotations that its module imports only for type checkers."""
        return {}


@functools.cache
def _hints(part: type[GuardedPart]) -> dict[str, Any]:
    """Return the type of each value of a part, and of the results of each method."""
    types = dict(part.named_types())
    found = get_type_hints(part, localns=types)
    for name, value in vars(part).items():
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if inspect.isfunction(function) and "return" in function.__annotations__:
            found[name] = get_type_hints(function, localns=types)["return"]
    return found


def _guarded(cls: type, name: str, hint: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an author's function, wrapped in its guard."""
    at = _place(function)

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        with _attributed(cls, name, at, args):
            found = function(*args, **kwargs)
        if hint is NoneType:
            return None
        _refuse_misfit(found, hint, cls, name, at, args)
        return items(found, args) if get_origin(hint) is Iterator else found

    def items(found: Iterator[Any], args: Sequence[Any]) -> Iterator[Any]:
        with _attributed(cls, name, at, args):
            for each in found:
                _refuse_misfit(each, get_args(hint)[0], cls, name, at, args)
                yield each

    return guarded


@contextmanager
def _attributed(cls: type, name: str, at: str | None, parts: Sequence[Any]) -> Iterator[None]:
    """Context manager that attributes an exception to the innermost line in the author's file."""
    try:
        yield
    except errors.OpsmithError:
        raise
    except Exception as error:
        at, hint = innermost(error, at) if at else at, ""
        if isinstance(error, ModuleNotFoundError) and error.name:
            hint = f"install the package of the module `{error.name}`, which {_package(cls)} needs"
        raised = _in_a_line(f"{type(error).__name__}: {errors.message_of(error)}")
        hint = hint or _correct(cls, at) + " with the whole traceback"
        raise _error(cls, name, ("fails", f": {raised}"), at, parts, hint) from error


def unusable(
    part: GuardedPart, name: str, expected: str, got: Any, parts: Sequence[Any] = ()
) -> errors.LanguageError:
    """Return the error for a value of a part that opsmith cannot use.

    Args:
        part: The part.
        name: Name of its method or value.
        expected: Description of a right value.
        got: The value.
        parts: Other values that may show the operator and the language.
    """
    at = _place(inspect.getattr_static(type(part), name, None))
    return _unusable(type(part), name, expected, got, at, (part, *parts))


def _unusable(
    cls: type, name: str, expected: str, got: Any, at: str | None, parts: Sequence[Any]
) -> errors.LanguageError:
    words = f"gives {_in_a_line(repr(got))}", f", where {expected} is right"
    return _error(cls, name, words, at, parts, _correct(cls, at))


def _error(
    cls: type, name: str, words: tuple[str, str], at: str | None, parts: Sequence[Any], hint: str
) -> errors.LanguageError:
    operator, language = _named(parts)
    problem = f"{language} {words[0]} in `{cls.__qualname__}.{name}`{words[1]}"
    return errors.LanguageError(problem, operator=operator, where=at, hint=hint)


def _place(function: Any) -> str | None:
    """Return `file:line` of a function in Python; None for other values."""
    return where(inspect.unwrap(function)) if inspect.isfunction(function) else None


def _in_a_line(text: str) -> str:
    """Return a text in one line, without memory addresses, since they differ between processes."""
    return textwrap.shorten(re.sub(r" at 0x[0-9a-fA-F]+", "", text), SHOWN, placeholder=" ...")


def _correct(cls: type, at: str | None) -> str:
    return f"correct {Path(at).name if at else 'the class'}, or report it to the authors of {_package(cls)}"


def _named(parts: Sequence[Any]) -> tuple[str | None, str]:
    """Return the operator that values belong to, if there is one, and a description of their language."""
    operators, languages = dict[str, None](), dict[str, None]()
    for each in (*parts, *(item for part in parts if isinstance(part, list | tuple) for item in part)):
        of = getattr(each, "__dict__", {}).get("kernel", each)
        operators[getattr(getattr(of, "operator", None), "name", "")] = None
        language = getattr(of, "language", None) or getattr(of, "name", None)
        languages[language if isinstance(language, str) else getattr(language, "name", "")] = None
    operators.pop("", None)
    languages.pop("", None)
    operator = next(iter(operators)) if len(operators) == 1 else None
    return operator, f"the kernel language {next(iter(languages))}" if languages else "a kernel language"


def _package(cls: type) -> str:
    """Return the package of a class, with its version; the class's module if no package is installed."""
    from importlib.metadata import entry_points  # errors alone need it

    root = cls.__module__.partition(".")[0]
    for point in entry_points(group=GROUP):
        if point.module.partition(".")[0] == root and point.dist is not None:
            return f"{point.dist.name} {point.dist.version}"
    return f"the module `{root}`"


def _refuse_misfit(
    value: Any, hint: Any, cls: type, name: str, at: str | None = None, parts: Sequence[Any] = ()
) -> None:
    """Refuse a value that does not fit the annotation.

    Raises:
        LanguageError: If it does not fit; names the innermost wrong value.
    """
    found = _misfit(value, hint)
    if found is not None:
        wrong, right = found
        plain = isinstance(right, type) and not get_args(right)
        expected = right.__name__ if plain else re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", str(right))
        raise _unusable(cls, name, expected, wrong, at, parts)


def _misfit(value: Any, hint: Any) -> tuple[Any, Any] | None:
    """Return the innermost wrong value and the expected type; None if the value fits."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Any or isinstance(kind, TypeVar):
        return None
    if kind is ClassVar:
        return _misfit(value, inner[0])
    if kind in (Union, UnionType):
        found = [_misfit(value, each) for each in inner]
        deeper = (each for each, of in zip(found, inner, strict=True) if each and each[1] is not of)
        return None if None in found else next(deeper, (value, hint))
    if kind is Literal:
        return None if value in inner else (value, hint)
    if kind is type:
        lacks = sorted(getattr(value, "__abstractmethods__", ()))
        if lacks or not isinstance(value, type) or not issubclass(value, inner[0]):
            return value, f"{hint} with `{'`, `'.join(lacks)}`" if lacks else hint
        return None
    is_text = isinstance(value, str | bytes) and kind not in (str, bytes)  # not a sequence of strings
    if is_text or not isinstance(value, (int, float) if kind is float else kind):
        return value, hint
    parts: Iterable[tuple[Any, Any]] = ()
    if inner and isinstance(value, Collection):
        parts = zip(value, inner if kind is tuple and ... not in inner else repeat(inner[0]), strict=False)
    elif is_dataclass(value) and kind.__module__.startswith("opsmith."):
        hints = get_type_hints(kind)
        parts = [(getattr(value, each.name), hints[each.name]) for each in fields(kind)]
    return next(filter(None, (_misfit(*each) for each in parts)), None)
