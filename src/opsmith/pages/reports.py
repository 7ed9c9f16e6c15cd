"""Reports that a check has written before."""

from __future__ import annotations

from pathlib import Path

from opsmith.checking import Report
from opsmith.checking.output.json import read_reports
from opsmith.pages.benchmarks import readable


def read_reports_of(file: Path) -> dict[str, Report]:
    """The reports of a file, by the names of their operators.

    Args:
        file: What `opsmith check --json` printed.

    Raises:
        UsageError: If it cannot be read, or holds something else.
    """
    return read_reports(readable(file, "opsmith check ... --json >"))
