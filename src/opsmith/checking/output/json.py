"""Reports out of JSON: of what `opsmith check --json` printed, or `Report.to_json()` gave."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any, TypeVar

from opsmith import errors
from opsmith.checking.report import SCHEMA, Failure, Outcome, Report

T = TypeVar("T")


def read_reports(text: str) -> dict[str, Report]:
    """The reports of a text, by the names of their operators.

    Args:
        text: JSON: one report, a list of them, or what the command printed.

    Raises:
        UsageError: If it is something else, or of another version.

    Example:
        >>> text = Report("demo::twice", (Outcome("forward", "passed"),), seed=0).to_json()
        >>> read_reports(text)["demo::twice"].outcomes[0].status
        'passed'
    """
    try:
        read = json.loads(text)
    except ValueError as error:
        raise _no_report("JSON", str(error)) from error
    if isinstance(read, Mapping) and isinstance(read.get("reports"), list):
        read = read["reports"]
    reports = [_report(each) for each in (read if isinstance(read, list) else [read])]
    return {report.operator: report for report in reports}


def _report(read: Any) -> Report:
    if isinstance(read, Mapping) and read.get("schema") != SCHEMA:
        raise _no_report(f'version {SCHEMA} of it, `"schema": {SCHEMA}`', repr(read.get("schema")))
    made = _made(Report, read, {"outcomes": _outcome})
    # What loading took is written as a part of all that compiles.
    loading = float(read.get("seconds_apart", 0.0)) - made.seconds_apart
    return replace(made, loading=round(max(loading, 0.0), 6))


def _outcome(read: Any) -> Outcome:
    return _made(Outcome, read, {"failures": lambda each: _made(Failure, each, {})})


def _made(kind: type[T], read: Any, parts: Mapping[str, Callable[[Any], Any]]) -> T:
    """An object of this kind from its JSON, whose lists are tuples, and whose parts are made first."""
    if not isinstance(read, Mapping):
        raise _no_report(f"an object for each {kind.__name__.lower()}", repr(read))
    given: dict[str, Any] = {}
    for each in fields(kind):  # type: ignore[arg-type]
        if each.name in read:
            value = read[each.name]
            made = parts.get(each.name, lambda item: item)
            given[each.name] = tuple(map(made, value)) if isinstance(value, list) else value
        elif each.default is MISSING and each.default_factory is MISSING:
            raise _no_report(f"`{each.name}` in each {kind.__name__.lower()}", ", ".join(map(str, read)))
    return kind(**given)


def _no_report(expected: str, got: str) -> errors.UsageError:
    return errors.UsageError(
        "this is no report of a check",
        expected=expected,
        got=got,
        hint="give what `opsmith check --json` printed, or `report.to_json()` gave",
    )
