"""Reports read from JSON: the output of `opsmith check --json` or of `Report.to_json()`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from opsmith import errors
from opsmith.checking.report import SCHEMA, Report
from opsmith.core.json_values import JsonMismatchError, from_json, parse


def read_reports(text: str) -> dict[str, Report]:
    """Read reports, by the names of their operators.

    Args:
        text: JSON: one report, a list of reports, or the output of the command.

    Raises:
        UsageError: If it is something else, or of another version.

    Example:
        >>> from opsmith.checking.report import Outcome
        >>> text = Report("demo::twice", (Outcome("forward", "passed"),), seed=0).to_json()
        >>> read_reports(text)["demo::twice"].outcomes[0].status
        'passed'
    """
    try:
        read = parse(text)
        if isinstance(read, Mapping) and isinstance(read.get("reports"), list):
            read = read["reports"]
        reports = [_report(each) for each in (read if isinstance(read, list) else [read])]
    except JsonMismatchError as error:
        raise errors.UsageError(
            "the text must be a report of a check",
            expected=error.expected,
            got=error.got,
            hint="give what `opsmith check --json` printed, or `report.to_json()` gave",
        ) from error
    return {report.operator: report for report in reports}


def _report(read: Any) -> Report:
    if isinstance(read, Mapping) and read.get("schema") != SCHEMA:
        raise JsonMismatchError(f'version {SCHEMA} of it, `"schema": {SCHEMA}`', repr(read.get("schema")))
    made = from_json(read, Report)
    # The time of loading is written as a part of the time of all properties that compile.
    loading = float(read.get("compile_seconds", 0.0)) - made.compile_seconds
    return replace(made, loading=round(max(loading, 0.0), 6))
