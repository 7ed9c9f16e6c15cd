"""Pages as text: templates filled with what was found; style and scripts are let through by their hashes."""

from __future__ import annotations

from collections.abc import Sequence

from opsmith.benchmarking import telling
from opsmith.checking.markup import Environment, source, templates
from opsmith.drawing.graph import shown_bytes
from opsmith.drawing.places import short_place
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


def _templates() -> Environment:
    made = templates("opsmith.pages")
    made.filters |= {"size": shown_bytes, "place": short_place}
    made.tests["absent"] = lambda value: isinstance(value, Absent)
    made.globals |= {"telling": telling}
    return made
