"""Reports as one HTML file that needs no network, for any screen and for screen readers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import ChoiceLoader, PackageLoader, StrictUndefined
from jinja2 import Environment as Environment
from markupsafe import Markup, escape

from opsmith import errors
from opsmith.checking.causes import CAUSES
from opsmith.checking.properties import PROPERTIES
from opsmith.checking.report import Failure, Outcome, Report, folded, shown
from opsmith.core.output_file import policy_hash


def page(reports: Sequence[Report], unchecked: Sequence[tuple[str, str]] = ()) -> str:
    """A page about one or several checks.

    Args:
        reports: Reports of the checks.
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
        reports=sorted(reports, key=lambda report: not report.failed),
        unchecked=unchecked,
        styles=[source(made, "page.css")],
        scripts=[source(made, "page.js")],
        environment=reports[0].environment if reports else {},
    )


def failure_page(failure: Failure) -> str:
    """A page about one failure."""
    made = templates()
    return made.get_template("failure.html").render(
        failure=failure, styles=[source(made, "page.css")], scripts=[source(made, "page.js")]
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


SIGNS = {
    "passed": "✓",
    "failed": "✗",
    "error": "✗",
    "warning": "!",
    "limit": "○",
    "skipped": "–",
    "unclear": "?",
}
"""Sign of each status, so that a status is not shown by colour alone."""

MEANINGS = {
    "passed": "the property ran in this dtype without a failure",
    "failed": "an error",
    "warning": "a warning",
    "limit": "a limit",
    "unclear": "unknown for this dtype: the failures are for float64, or name no dtype",
    "": "the property did not run in this dtype",
}
"""Meaning of each sign in the column of a dtype, in the order of the legend."""


def templates(*packages: str) -> Environment:
    """The templates of a check, and the templates of further packages, which may use them.

    Args:
        packages: Packages with a folder `templates`.
    """
    made = Environment(
        loader=ChoiceLoader([PackageLoader(each, "templates") for each in (*packages, "opsmith.checking")]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: errors.printable(value) if isinstance(value, str) else value,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {
        "kind": _kind,
        "pairs": lambda value: value.items(),
        "plain": shown,
        "folded": folded,
        "worded": worded,
        "state": state,
        "short": short,
    }
    made.globals |= {
        "signs": SIGNS,
        "causes": CAUSES,
        "titles": {name: known.title for name, known in PROPERTIES.items()},
        "verdict": verdict,
        "failures": failures,
        "legend": legend,
        "policy_hash": policy_hash,
    }
    return made


def verdict(report: Report) -> str:
    """A report's verdict without the operator's name, which the page shows above it."""
    return report.verdict().removeprefix(f"{report.operator}: ")


def state(report: Report) -> str:
    """Key of `SIGNS` for a whole report."""
    return "passed" if report.passed_as_asked else "failed" if report.failed else "skipped"


def legend(report: Report) -> list[tuple[str, str]]:
    """The signs in the dtype columns of a report, each with its meaning."""
    used = {outcome.in_dtype(dtype) for outcome in report.ran() for dtype in report.dtypes}
    return [(SIGNS.get(name, "empty"), words) for name, words in MEANINGS.items() if name in used]


def short(dtype: str) -> str:
    """The short name of a dtype, as the heading of a narrow column.

    Example:
        >>> short("bfloat16"), short("float64"), short("complex128"), short("float8_e5m2")
        ('bf16', 'f64', 'c128', 'f8_e5m2')
    """
    return dtype.replace("bfloat", "bf").replace("float", "f").replace("complex", "c")


def failures(report: Report) -> list[tuple[Outcome, list[Failure], list[Failure]]]:
    """Properties with failures, the worst first: each with the failures to show in full, and the rest."""
    found = []
    for outcome in (each for each in report.outcomes if each.failures):
        ranked = sorted(outcome.failures, key=Failure.rank)
        whole = [each for each in ranked if each.is_whole()]
        found.append((outcome, whole, [each for each in ranked if not each.is_whole()]))
    return sorted(found, key=lambda one: min(each.rank() for each in one[0].failures))


def _kind(value: Any) -> str:
    """Format of a piece of evidence: `parts`, `block` or `line`."""
    return "parts" if isinstance(value, Mapping) else "block" if "\n" in shown(value) else "line"


def worded(text: str) -> Markup:
    """A sentence in HTML, in which text between backticks becomes code."""
    return Markup(re.sub(r"`([^`\n]+)`", r"<code>\1</code>", str(escape(text))))


def source(made: Environment, name: str) -> str:
    """The text of a style sheet or script in the templates."""
    assert made.loader is not None
    return made.loader.get_source(made, name)[0]
