"""Reports read from JSON: the output of `opsmith check --json` or of `Report.to_json()`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from opsmith import errors
from opsmith.checking.report import Report
from opsmith.core.json_documents import DocumentFormat, from_json

FORMAT = DocumentFormat(
    errors.ReportFormatError,
    "report",
    Path(__file__).parents[1] / "report.schema.json",
    "check again with this version: `opsmith check ... --json > FILE`, or `Report.to_json()`",
)


def read_reports(text: str | bytes, file: Path | None = None) -> dict[str, Report]:
    """Read reports, by the names of their operators.

    Args:
        text: JSON: one report, a list of reports, or the output of the command.
        file: The file that has it, for messages.

    Raises:
        ReportFormatError: If it is something else, or of another version.

    Example:
        >>> from opsmith.checking.report import Outcome
        >>> text = Report("demo::twice", (Outcome("forward", "passed"),), seed=0).to_json()
        >>> read_reports(text)["demo::twice"].outcomes[0].status
        'passed'
    """
    reports = {}
    for each in FORMAT.read(text, file).values():
        made = from_json(each, Report)
        # The time of loading is written as a part of the time of all properties that compile.
        loading = max(each["compile_seconds"] - made.compile_seconds, 0.0)
        reports[made.operator] = replace(made, loading=round(loading, 6))
    return reports
