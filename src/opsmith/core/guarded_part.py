"""Parts of opsmith that other packages may write: what their code raises or returns is an error in words."""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from opsmith import errors
from opsmith.core.location import where

GROUP = "opsmith.languages"
"""Group of entry points, as `helion = "opsmith_helion:LANGUAGE"`."""
SHOWN = 200
"""Most characters of a wrong value, or of an exception, in a message."""


class GuardedPart:
    """Base of the parts of a kernel language.

    In a class of another package each method that this part has calls the author's in a guard: an exception
    that is no error of opsmith becomes a `LanguageError`, and so does a result of another type than the
    annotation says. Values of the class are compared with its annotations when it is defined.

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
        """Return types in its annotations that its module imports for type checkers alone."""
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
    """Return a function of an author in its guard."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            found = function(*args, **kwargs)
        except errors.OpsmithError:
            raise
        except Exception as error:
            raise _failed(cls, name, function, args, error) from error
        if hint is NoneType:
            return None
        _refuse_misfit(found, hint, cls, name, function, args)
        return items(found, args) if get_origin(hint) is Iterator else found

    def items(found: Iterable[Any], args: Sequence[Any]) -> Iterator[Any]:
        try:
            for each in found:
                _refuse_misfit(each, get_args(hint)[0], cls, name, function, args)
                yield each
        except errors.OpsmithError:
            raise
        except Exception as error:
            raise _failed(cls, name, function, args, error) from error

    return guarded


def _failed(
    cls: type, name: str, function: Callable[..., Any], parts: Sequence[Any], error: Exception
) -> errors.LanguageError:
    """Return the error for an exception, at the innermost line in the file of the function."""
    calls = traceback.extract_tb(error.__traceback__)[1:]  # without the guard
    own = [each for each in calls if each.filename == calls[0].filename]
    at = f"{own[-1].filename}:{own[-1].lineno}" if own else _place(function)
    operator, language = _named(parts)
    package, lacks = _package(cls), isinstance(error, ModuleNotFoundError) and error.name
    raised = _in_a_line(f"{type(error).__name__}: {errors.message_of(error)}")
    return errors.LanguageError(
        f"{language} fails in `{cls.__qualname__}.{name}`: {raised}",
        operator=operator,
        where=at,
        hint=f"install the package of the module `{lacks}`, which {package} needs"
        if lacks
        else _correct(cls, at) + " with the whole traceback",
    )


def unusable(
    part: GuardedPart, name: str, expected: str, got: Any, parts: Sequence[Any] = ()
) -> errors.LanguageError:
    """Return the error for something that a part gives and that opsmith cannot use.

    Args:
        part: The part.
        name: Name of its method or value.
        expected: Words for what is right.
        got: The value.
        parts: Other values that may name operator and language.
    """
    at = _place(inspect.getattr_static(type(part), name, None))
    return _unusable(type(part), name, expected, got, at, (part, *parts))


def _refuse_misfit(
    value: Any,
    hint: Any,
    cls: type,
    name: str,
    function: Callable[..., Any] | None = None,
    parts: Sequence[Any] = (),
) -> None:
    """Refuse a value of another type than the annotation says.

    Raises:
        LanguageError: With the innermost wrong value.
    """
    found = _misfit(value, hint)
    if found is not None:
        raise _unusable(cls, name, *found, _place(function), parts)


def _place(function: Any) -> str | None:
    """Return `file:line` of a function in Python; None for other values."""
    return where(inspect.unwrap(function)) if inspect.isfunction(function) else None


def _unusable(
    cls: type, name: str, expected: str, got: Any, at: str | None, parts: Sequence[Any]
) -> errors.LanguageError:
    operator, language = _named(parts)
    return errors.LanguageError(
        f"{language} gives {_in_a_line(repr(got))} in `{cls.__qualname__}.{name}`, where {expected} is right",
        operator=operator,
        where=at,
        hint=_correct(cls, at),
    )


def _in_a_line(text: str) -> str:
    """Return a text in one line, without addresses, which differ between processes."""
    return textwrap.shorten(re.sub(r" at 0x[0-9a-fA-F]+", "", text), SHOWN, placeholder=" ...")


def _correct(cls: type, at: str | None) -> str:
    return f"correct {Path(at).name if at else 'the class'}, or report it to the authors of {_package(cls)}"


def _named(parts: Sequence[Any]) -> tuple[str | None, str]:
    """Return the operator that values are about, if it is one, and words for their language."""
    operators, languages = dict[str, None](), dict[str, None]()
    for each in (*parts, *(item for part in parts if isinstance(part, list | tuple) for item in part)):
        of = getattr(each, "__dict__", {}).get("kernel", each)
        operators[getattr(getattr(of, "operator", None), "name", None) or ""] = None
        language = getattr(of, "language", None) or getattr(of, "name", None)
        languages[language if isinstance(language, str) else getattr(language, "name", "")] = None
    operators.pop("", None)
    languages.pop("", None)
    operator = next(iter(operators)) if len(operators) == 1 else None
    return operator, f"the kernel language {next(iter(languages))}" if languages else "a kernel language"


def _package(cls: type) -> str:
    """Return the package that brings a class, with its version; its module if none is installed."""
    from importlib.metadata import entry_points  # errors alone need it

    root = cls.__module__.partition(".")[0]
    for point in entry_points(group=GROUP):
        if point.module.partition(".")[0] == root and point.dist is not None:
            return f"{point.dist.name} {point.dist.version}"
    return f"the module `{root}`"


def _misfit(value: Any, hint: Any) -> tuple[str, Any] | None:
    """Return the expected type, and the value or the one in it that has another; None if it fits."""
    origin, inner = get_origin(hint), get_args(hint)
    plain = origin or hint
    if plain is ClassVar:
        return _misfit(value, inner[0])
    if plain in (Union, UnionType):
        found = [_misfit(value, each) for each in inner]
        pairs = [(each, of) for each, of in zip(found, inner, strict=True) if each is not None]
        deeper = [each for each, of in pairs if each[1] is not value or each[0] != _shown(of)]
        return None if None in found else next(iter(deeper), (_shown(hint), value))
    if plain is Literal:
        return None if value in inner else (_shown(hint), value)
    if plain is Any or isinstance(plain, TypeVar):
        return None
    if plain is type:
        fits = isinstance(value, type) and issubclass(value, inner[0])
        lacks = sorted(getattr(value, "__abstractmethods__", ())) if fits else ()
        expected = f"{_shown(hint)} with `{'`, `'.join(lacks)}`" if lacks else _shown(hint)
        return (expected, value) if lacks or not fits else None
    if issubclass(plain, Iterable) and plain not in (str, bytes):
        return _misfit_within(value, hint, plain, inner)
    if not isinstance(value, (int, float) if plain is float else plain):
        return _shown(hint), value
    return _misfit_of_fields(value) if is_dataclass(value) else None


def _misfit_within(value: Any, hint: Any, plain: Any, inner: Sequence[Any]) -> tuple[str, Any] | None:
    """Return the misfit of a collection or an iterator, or of its first wrong item."""
    kind = next(each for each in (Mapping, Collection, Iterable) if issubclass(plain, each))
    if isinstance(value, str | bytes) or not isinstance(value, kind):
        return _shown(hint), value
    if kind is Iterable:
        return None  # an iterator is read later, item by item
    items = [*value.items()] if isinstance(value, Mapping) else [(each,) for each in value]
    pairs = ((each, type) for item in items for each, type in zip(item, inner, strict=False))
    return next(filter(None, (_misfit(each, type) for each, type in pairs)), None)


def _misfit_of_fields(value: Any) -> tuple[str, Any] | None:
    """Return the misfit of the first wrong field of a dataclass of opsmith."""
    kind = type(value)
    hints = get_type_hints(kind) if kind.__module__.startswith("opsmith.") else {}
    for each in fields(value) if hints else ():
        found = _misfit(getattr(value, each.name), hints[each.name])
        if found is not None:
            return f"`{kind.__name__}.{each.name}`: {found[0]}", found[1]
    return None


def _shown(hint: Any) -> str:
    """Return a type as its author writes it.

    Example:
        >>> _shown(Sequence[int] | None)
        'Sequence[int] | None'
    """
    return (
        hint.__name__
        if isinstance(hint, type) and not get_args(hint)
        else re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", str(hint))
    )
