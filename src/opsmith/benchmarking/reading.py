"""From JSON back to a benchmark: every value has the type that the benchmark declares for it."""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

from opsmith import errors
from opsmith.core.calls import shown

T = TypeVar("T")


def parsed(text: str) -> Any:
    """What JSON text says.

    Raises:
        BenchmarkFormatError: If it is no JSON.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise _no_benchmark("JSON", f"{error}") from error


def read_benchmark(read: Any, kind: type[T], version: int) -> T:
    """A benchmark from JSON's types.

    Args:
        read: What was read.
        kind: The class of benchmarks.
        version: The version that is understood.

    Raises:
        BenchmarkFormatError: If it is something else, or of another version.
    """
    if not isinstance(read, Mapping) or "schema" not in read or "cases" not in read:
        keys = f"the keys {', '.join(map(str, list(read)[:6]))}" if isinstance(read, Mapping) else shown(read)
        raise _no_benchmark("an object with the keys `schema` and `cases`", keys)
    if read["schema"] != version:
        raise errors.BenchmarkFormatError(
            "a benchmark of another version cannot be compared",
            expected=f"schema {version}",
            got=f"schema {shown(read['schema'])}",
            hint="measure again what it measured, with this version of opsmith",
        )
    made: T = _value({name: value for name, value in read.items() if name != "schema"}, kind, "")
    for at, case in enumerate(read["cases"]):
        for number, timing in enumerate(case["timings"]):
            if not timing["seconds"] or min(timing["seconds"]) <= 0:
                place = f"cases[{at}].timings[{number}].seconds"
                raise _misfit(place, "times above 0, one at least", timing["seconds"])
    return made


def _no_benchmark(expected: str, got: str) -> errors.BenchmarkFormatError:
    return errors.BenchmarkFormatError(
        "this is no benchmark that opsmith wrote",
        expected=expected,
        got=got,
        hint="give what `opsmith benchmark --json` printed, or `Benchmark.to_json()` returned",
    )


def _value(read: Any, kind: Any, place: str) -> Any:
    """A value of a declared type."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        inner = [part for part in parts if part is not type(None)]
        return None if read is None else _value(read, inner[0], place)
    if isinstance(kind, type) and is_dataclass(kind):
        return _object(read, kind, place)
    if origin is tuple:
        if not isinstance(read, list | tuple):
            raise _misfit(place, "a list", read)
        return tuple(_value(each, parts[0], f"{place}[{at}]") for at, each in enumerate(read))
    if origin is Mapping:
        if not isinstance(read, Mapping):
            raise _misfit(place, "an object", read)
        return {str(name): _value(each, parts[1], f"{place}.{name}") for name, each in read.items()}
    if kind is float and isinstance(read, int | float) and not isinstance(read, bool):
        if not math.isfinite(read):
            raise _misfit(place, "a finite number", read)
        return float(read)
    if type(read) is not kind:
        raise _misfit(place, {str: "a string", int: "a whole number", float: "a number"}[kind], read)
    return read


def _object(read: Any, kind: type[T], place: str) -> T:
    if not isinstance(read, Mapping):
        raise _misfit(place, "an object", read)
    hints: dict[str, Any] = typing.get_type_hints(kind)
    given: dict[str, Any] = {}
    for each in fields(kind):  # type: ignore[arg-type]  # which is a dataclass
        if each.name in read:
            given[each.name] = _value(read[each.name], hints[each.name], f"{place}.{each.name}".lstrip("."))
        elif each.default is MISSING:
            raise _no_benchmark(f"the key `{each.name}` in `{place or 'the object'}`", "none")
    return kind(**given)


def _misfit(place: str, expected: str, read: Any) -> errors.BenchmarkFormatError:
    return _no_benchmark(f"{expected} for `{place}`", shown(read))
