"""Graph as an interactive HTML page or figure, which needs no network."""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from opsmith.core.output_file import policy_hash
from opsmith.display import short_repr
from opsmith.drawing.captions import WORDS, heading, kinds_of, lines
from opsmith.drawing.graph import Graph, Node, counted, format_bytes
from opsmith.drawing.grouping import (
    MAX_NODES,
    closed_at,
    fitting_depth,
    folded,
    operators_among,
    sectioned,
    with_references,
)
from opsmith.errors import xml_text

_SCRIPTS = ("layout.js", "shapes.js", "graph.js")

FIRST = 60
"""Largest number of nodes at first, if groups can be unfolded."""


@dataclass(frozen=True)
class Figure:
    """A graph as parts of a page; all figures of a page share one style and one script.

    Args:
        style: The content of a `<style>` element.
        markup: The markup of the figure.
        script: The content of a `<script>` element at the end of the page.
    """

    __repr__ = short_repr

    style: str
    markup: str
    script: str


def figure(graph: Graph, *, depth: int | None = None, show_attrs: bool = False) -> Figure:
    """A graph as an interactive figure for use in a page.

    Args:
        graph: The graph.
        depth: Number of levels of modules unfolded at first; None for as many as fit.
        show_attrs: Write attributes on nodes.
    """
    text = json.dumps(_data(graph, depth, show_attrs), separators=(",", ":"), ensure_ascii=False)
    for letter in "<>&\u2028\u2029":  # these characters must not end the script element or a line
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    filled = {"title": _title(graph), "data": xml_text(text)}
    markup = re.sub(r"\$\{([a-z-]+)\}", lambda found: filled[found[1]], _source("graph.html"))
    return Figure(_source("graph.css"), markup, "".join(map(_source, _SCRIPTS)))


def to_page(graph: Graph, *, depth: int | None = None, show_attrs: bool = False) -> str:
    """A graph as a complete page.

    Example:
        >>> from opsmith.drawing.graph import Graph, Node
        >>> text = to_page(Graph("y", "forward", (Node("a", "input", "x"),), ()))
        >>> text.splitlines()[0], "http" in text.replace("http://www.w3.org", "").replace("http-equiv", "")
        ('<!doctype html>', False)
    """
    parts = figure(graph, depth=depth, show_attrs=show_attrs)
    filled = {
        "title": _title(graph),
        "style-hash": policy_hash(parts.style),
        "script-hash": policy_hash(parts.script),
        "style": parts.style,
        "script": parts.script,
        "figure": parts.markup,
    }
    # One pass, since text of the graph may contain placeholders.
    return re.sub(r"\$\{([a-z-]+)\}", lambda found: filled[found[1]], _source("page.html"))


def _title(graph: Graph) -> str:
    return html.escape(xml_text(graph.title))


@cache
def _source(name: str) -> str:
    return (resources.files("opsmith.drawing") / "templates" / name).read_text(encoding="utf-8")


def _data(graph: Graph, depth: int | None, attributes: bool) -> dict[str, Any]:
    """The data for the script."""
    if depth is None and len(folded(graph, closed_at(graph, 0)).nodes) > MAX_NODES:
        graph = sectioned(graph, MAX_NODES)
    drawn = with_references(graph)
    level = fitting_depth(graph, FIRST) if depth is None else depth
    closed = closed_at(graph, level)
    labels = {group.id: group.label for group in graph.groups}
    groups = []
    for group in graph.groups:
        members = graph.members(group.id)
        own = sum(node.own_bytes for node in members)
        caption = [*[group.title] * bool(group.title), counted(len(members), "node")]
        caption += operators_among(members) if group.kind != "operator" else []
        groups.append(
            {
                "id": group.id,
                "label": group.label,
                "kind": group.kind,
                "parent": group.parent,
                "lines": [*caption, *[f"keeps {format_bytes(own)}"] * bool(own)],
                "open": group.id not in closed,
            }
        )
    return {
        "title": graph.title,
        "summary": graph.summary(),
        "notes": list(graph.notes),
        "kinds": [{"kind": kind, "words": WORDS[kind]} for kind in kinds_of(drawn)],
        "groups": groups,
        "nodes": [_node(node, labels.get(node.group or "", ""), attributes) for node in drawn.nodes],
        "edges": [[edge.source, edge.target, edge.label, edge.kind] for edge in drawn.edges],
        "heaviest": [{"id": node.id, "bytes": format_bytes(node.own_bytes)} for node in graph.heaviest(8)],
    }


def _node(node: Node, group: str, attributes: bool) -> dict[str, Any]:
    details = {
        "what": WORDS[node.kind],
        "module": node.name or group,
        "form": "; ".join(map(str, node.forms)),
        "called at": node.where,
        "line": node.source,
        "autograd's node": node.recorded,
        **dict(node.attributes),
    }
    return {
        "id": node.id,
        "kind": node.kind,
        "label": heading(node),
        "lines": list(lines(node, attributes=attributes)),
        "group": node.group,
        "of": node.id.partition("@")[0] if node.kind == "reference" else None,
        "after": "@@" in node.id,
        "details": [[name, value] for name, value in details.items() if value],
        "saved": [str(each) for each in node.saved],
        "bytes": format_bytes(node.own_bytes) if node.own_bytes else "",
        "module": node.name or group,
    }
