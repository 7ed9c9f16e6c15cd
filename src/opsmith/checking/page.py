"""Reports as a page: one HTML file that needs no network, to be read on any screen, or aloud."""

from __future__ import annotations

from collections.abc import Sequence

from opsmith.checking.markup import source, templates
from opsmith.checking.report import Report


def page(reports: Sequence[Report], unchecked: Sequence[tuple[str, str]] = ()) -> str:
    """A page about one or several checks.

    Args:
        reports: What the checks found.
        unchecked: Names of operators that could not be checked, each with the reason.

    Example:
        >>> from opsmith.checking import Outcome, Report
        >>> text = page([Report("demo::twice", (Outcome("forward", "passed"),), seed=0)])
        >>> text.splitlines()[0], "demo::twice" in text
        ('<!doctype html>', True)
    """
    made = templates()
    return made.get_template("page.html").render(
        title=_title(reports, unchecked),
        summary=_summary(reports, unchecked),
        reports=reports,
        unchecked=unchecked,
        style=source(made, "page.css"),
        script=source(made, "page.js"),
        environment=reports[0].environment if reports else {},
    )


def _title(reports: Sequence[Report], unchecked: Sequence[tuple[str, str]]) -> str:
    names = [report.operator for report in reports] + [name for name, _ in unchecked]
    return f"opsmith check: {names[0] if len(names) == 1 else f'{len(names)} operators'}"


def _summary(reports: Sequence[Report], unchecked: Sequence[tuple[str, str]]) -> str:
    passed = sum(report.passed_as_asked for report in reports)
    parts = [f"{passed} passed"] if passed else []
    parts += [f"{len(reports) - passed} not passed"] if passed < len(reports) else []
    parts += [f"{len(unchecked)} could not be checked"] if unchecked else []
    return ", ".join(parts) or "nothing was checked"
