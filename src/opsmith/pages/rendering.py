"""Pages as text: templates filled with what was found; style and scripts are let through by their hashes."""

from __future__ import annotations

from collections.abc import Sequence

from opsmith.benchmarking import telling
from opsmith.checking.output.html import Environment, source, templates
from opsmith.checking.report import Report
from opsmith.drawing.graph import shown_bytes
from opsmith.drawing.places import short_place
from opsmith.pages.aspects import Aspect
from opsmith.pages.content import Absent, Content

SECTIONS = {
    "check": "Check",
    "origins": "Handwritten and derived",
    "code": "Source",
    "graph": "Graph",
    "memory": "Saved for the backward",
    "kernels": "Kernels",
    "benchmark": "Benchmark",
    "onnx": "ONNX",
    "environment": "Environment",
}


def rendered(content: Content, index: str | None = None) -> str:
    """The page of one operator.

    Args:
        content: What it says.
        index: Name of the file beside it that lists others; None where there is none.
    """
    made = _templates()
    styles = [source(made, "page.css"), source(made, "operator.css")]
    scripts = [source(made, "page.js")]
    if not isinstance(content.graph, Absent):
        styles.append(content.graph.style)
        scripts.append(content.graph.script)
    return made.get_template("operator.html").render(
        content=content, index=index, sections=SECTIONS, styles=styles, scripts=scripts
    )


def rendered_index(contents: Sequence[Content], files: Sequence[str]) -> str:
    """The page that lists several.

    Args:
        contents: What each says.
        files: Their files, beside this one.
    """
    made = _templates()
    styles = [source(made, "page.css"), source(made, "operator.css")]
    return made.get_template("index.html").render(
        pages=list(zip(contents, files, strict=True)),
        styles=styles,
        scripts=[],
        environment=contents[0].environment,
    )


def verdict_on(aspect: Aspect, report: Report | Absent) -> tuple[str, str]:
    """What a check says of an aspect: a status, or none, and words.

    A property may have passed without a kernel that cannot run here: then that is what is said of the kernel.
    """
    name = aspect.checked_by
    if not name:
        return "", ""
    outcomes = [] if isinstance(report, Absent) else report.outcomes
    found = next((each for each in outcomes if each.property == name), None)
    if found is None:
        return "", f"{name}: not checked"
    if aspect.where and any(aspect.where in note and "did not run" in note for note in found.notes):
        return "skipped", f"{name}: did not run here"
    return found.status, f"{name} {found.status}"


def _templates() -> Environment:
    made = templates("opsmith.pages")
    made.filters |= {"size": shown_bytes, "place": short_place, "verdict_on": verdict_on}
    made.tests["absent"] = lambda value: isinstance(value, Absent)
    made.globals |= {"telling": telling}
    return made
