"""What has come of a run of `opsmith check`: reports, and what could not be checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from opsmith import errors
from opsmith.checking.report import SCHEMA, Report
from opsmith.cli.guard import FAILED, INTERRUPTED, UNUSABLE


@dataclass
class Tally:
    """What has come of the operators so far.

    Args:
        reports: Of those that were checked.
        unchecked: Why others could not be.
        interrupted: Names of those that Ctrl-C has left.
    """

    reports: list[Report] = field(default_factory=list)
    unchecked: list[errors.OpsmithError] = field(default_factory=list)
    interrupted: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        """The exit status."""
        if self.interrupted:
            return INTERRUPTED
        if self.unchecked:
            return UNUSABLE
        return 0 if all(report.passed_as_asked for report in self.reports) else FAILED

    def summary(self) -> str:
        """How many passed, in a line."""
        passed = sum(report.passed_as_asked for report in self.reports)
        parts = [f"{passed} passed", f"{len(self.reports) - passed} not passed"]
        parts += [f"{len(self.unchecked)} could not be checked"] if self.unchecked else []
        parts += [f"{len(self.interrupted)} interrupted"] if self.interrupted else []
        every = len(self.reports) + len(self.unchecked) + len(self.interrupted)
        return f"{every} operators: {', '.join(parts)}"

    def unchecked_entries(self) -> list[dict[str, Any]]:
        """The name of each operator that was not checked, and why not."""
        left = [{"operator": name, "message": INTERRUPTION} for name in self.interrupted]
        return [{"operator": error.operator, "message": str(error)} for error in self.unchecked] + left

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints; `report.schema.json` of `opsmith.checking` describes it."""
        return {
            "schema": SCHEMA,
            "passed": self.status == 0,
            "reports": [report.to_dict() for report in self.reports],
            "unchecked": self.unchecked_entries(),
            "interrupted": bool(self.interrupted),
        }


INTERRUPTION = "interrupted by Ctrl-C before it was checked"
