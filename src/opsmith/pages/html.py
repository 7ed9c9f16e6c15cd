"""Pages as HTML: templates filled with the content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opsmith.benchmarking import text
from opsmith.checking.output.html import Environment, source, templates
from opsmith.checking.report import Report
from opsmith.core.location import short_location
from opsmith.core.operator import Operator
from opsmith.display import framed
from opsmith.drawing.graph import format_bytes
from opsmith.pages.aspects import Aspect, aspects_of
from opsmith.pages.content import AbsentSection, PageContent
from opsmith.pages.declaration import signature_of

SECTIONS = {
    "check": "Check",
    "origins": "Handwritten and derived",
    "code": "Source",
    "graph": "Graph",
    "memory": "Saved for the backward",
    "kernels": "Kernels",
    "accesses": "Accesses to memory",
    "benchmark": "Benchmark",
    "onnx": "ONNX",
    "environment": "Environment",
}


def rendered(content: PageContent, index: str | None = None) -> str:
    """The page of one operator.

    Args:
        content: The content.
        index: Name of the index file; None for none.
    """
    made = _templates()
    styles = [source(made, "page.css"), source(made, "operator.css")]
    scripts = [source(made, "page.js")]
    if not isinstance(content.graph, AbsentSection):
        styles.append(content.graph.style)
        scripts.append(content.graph.script)
    return made.get_template("operator.html").render(
        content=content, index=index, sections=SECTIONS, styles=styles, scripts=scripts
    )


def operator_html(operator: Operator[..., Any]) -> str:
    """An operator as displayed in a notebook: its declaration, and the origin of each aspect."""
    made = _templates()
    specification = operator.specification
    page = made.get_template("handle.html").render(
        name=specification.name,
        where=specification.where,
        signature=signature_of(specification),
        aspects=aspects_of(specification),
        report=AbsentSection("not checked"),
        styles=[source(made, "page.css"), source(made, "operator.css")],
        scripts=[],
    )
    return framed(page, 560, f"operator {specification.name}")


def rendered_index(contents: Sequence[PageContent], files: Sequence[str]) -> str:
    """The index of several pages.

    Args:
        contents: The content of each page.
        files: Their file names.
    """
    made = _templates()
    styles = [source(made, "page.css"), source(made, "operator.css")]
    return made.get_template("index.html").render(
        pages=list(zip(contents, files, strict=True)),
        styles=styles,
        scripts=[],
        environment=contents[0].environment,
    )


def verdict_on(aspect: Aspect, report: Report | AbsentSection) -> tuple[str, str]:
    """Return the status of an aspect in a report (empty if it has none), and its description.

    If a property passed, but a kernel could not run here, the kernel is reported as skipped.
    """
    name = aspect.checked_by
    if not name:
        return "", ""
    outcomes = [] if isinstance(report, AbsentSection) else report.outcomes
    found = next((each for each in outcomes if each.property == name), None)
    if found is None:
        return "", f"{name}: not checked"
    if aspect.where and any(aspect.where in note for note in found.notes):  # kernels that did not run
        return "skipped", f"{name}: did not run here"
    return found.word(), f"{name} {found.word()}"


def _templates() -> Environment:
    made = templates("opsmith.pages", "opsmith.benchmarking")
    made.filters |= {"size": format_bytes, "place": short_location, "verdict_on": verdict_on}
    made.tests["absent"] = lambda value: isinstance(value, AbsentSection)
    made.globals |= {"benchmark_text": text}
    return made
