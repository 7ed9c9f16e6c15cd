"""What has come of a run of `opsmith check`: reports, and what could not be checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from opsmith import errors
from opsmith.checking.report import SCHEMA, Report
from opsmith.cli.guard import FAILED, UNUSABLE


@dataclass
class Tally:
    """What has come of the operators so far."""

    reports: list[Report] = field(default_factory=list)
    unchecked: list[errors.OpsmithError] = field(default_factory=list)

    @property
    def status(self) -> int:
        """The exit status."""
        if self.unchecked:
            return UNUSABLE
        return 0 if all(report.passed_as_asked for report in self.reports) else FAILED

    def summary(self) -> str:
        """How many passed, in a line."""
        passed = sum(report.passed_as_asked for report in self.reports)
        parts = [f"{passed} passed", f"{len(self.reports) - passed} not passed"]
        parts += [f"{len(self.unchecked)} could not be checked"] if self.unchecked else []
        return f"{len(self.reports) + len(self.unchecked)} operators: {', '.join(parts)}"

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints; `report.schema.json` of `opsmith.checking` describes it."""
        return {
            "schema": SCHEMA,
            "passed": self.status == 0,
            "reports": [report.to_dict() for report in self.reports],
            "unchecked": [{"operator": error.operator, "message": str(error)} for error in self.unchecked],
        }
