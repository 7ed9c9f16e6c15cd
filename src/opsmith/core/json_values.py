"""Dataclasses out of JSON: each value is checked against the annotation of its field."""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar

from opsmith.core.call_arguments import shown

T = TypeVar("T")
NAMES = {str: "a string", bool: "true or false", int: "a whole number", float: "a number"}


class JsonMismatchError(ValueError):
    """A value of JSON that does not fit its annotation.

    Args:
        expected: The expected value and its path.
        got: The value that was read.
    """

    def __init__(self, expected: str, got: str) -> None:
        super().__init__(f"expected {expected}, got {got}")
        self.expected, self.got = expected, got


def parse(text: str) -> Any:
    """Parse JSON text.

    Raises:
        JsonMismatchError: If it is not JSON.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise JsonMismatchError("JSON", str(error)) from error


def from_json(value: Any, kind: type[T], path: str = "") -> T:
    """Make a dataclass of a JSON object; lists become tuples, and unknown keys are ignored.

    Args:
        value: The JSON object.
        kind: The dataclass. Its annotations may be dataclasses, `tuple[X, ...]`, `Mapping[str, X]`,
            `X | None`, `Literal`, plain types and `Any`.
        path: Path of the object in the document, for messages.

    Raises:
        JsonMismatchError: If a key is missing, or a value has another type.

    Example:
        >>> from dataclasses import make_dataclass
        >>> Point = make_dataclass("Point", [("x", float), ("labels", tuple[str, ...], ())])
        >>> from_json({"x": 1, "labels": ["a"]}, Point)
        Point(x=1.0, labels=('a',))
        >>> from_json({"x": "1"}, Point)
        Traceback (most recent call last):
        opsmith.core.json_values.JsonMismatchError: expected a number for `x`, got str '1'
    """
    if not isinstance(value, Mapping):
        raise _mismatch("an object", value, path)
    annotations: dict[str, Any] = typing.get_type_hints(kind)
    given: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]  # which is a dataclass
        if field.name in value:
            inner = f"{path}.{field.name}".lstrip(".")
            given[field.name] = _value(value[field.name], annotations[field.name], inner)
        elif field.default is MISSING and field.default_factory is MISSING:
            inside = f" in `{path}`" if path else ""
            keys = ", ".join(map(str, value)) or "no key"
            raise JsonMismatchError(f"the key `{field.name}`{inside}", keys)
    return kind(**given)


def _value(value: Any, annotation: Any, path: str) -> Any:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return value
    if origin is Literal:
        if value not in parts:
            raise _mismatch(f"one of {', '.join(map(repr, parts))}", value, path)
        return value
    if origin is types.UnionType:
        inner = next(part for part in parts if part is not type(None))
        return None if value is None else _value(value, inner, path)
    if is_dataclass(annotation):
        return from_json(value, annotation, path)  # type: ignore[arg-type]
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _mismatch("a list", value, path)
        return tuple(_value(each, parts[0], f"{path}[{at}]") for at, each in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise _mismatch("an object", value, path)
        return {str(key): _value(each, parts[1], f"{path}.{key}") for key, each in value.items()}
    if annotation is float and type(value) in (int, float):
        if not math.isfinite(value):
            raise _mismatch("a finite number", value, path)
        return float(value)
    if type(value) is not annotation:
        raise _mismatch(NAMES[annotation], value, path)
    return value


def _mismatch(expected: str, value: Any, path: str) -> JsonMismatchError:
    return JsonMismatchError(f"{expected} for `{path}`" if path else expected, shown(value))
