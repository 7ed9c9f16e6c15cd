"""Graphviz: a graph in DOT, rendered as SVG, PNG or PDF with pygraphviz."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from xml.sax.saxutils import escape

from opsmith import errors
from opsmith.drawing.captions import WORDS, heading, kinds_of, lines, tooltip
from opsmith.drawing.graph import Graph, Group, Kind, Node
from opsmith.drawing.grouping import with_references
from opsmith.errors import xml_text
from opsmith.extras import install


# The colours are tints of the palette of Okabe and Ito, which is safe for colour-blind readers (Color
# Universal Design, 2008); each kind also has its own shape or line style, for print.
def _style(shape: str, fillcolor: str, color: str, **more: str) -> dict[str, str]:
    return {"shape": shape, "fillcolor": fillcolor, "color": color, **more}


STYLES: dict[Kind, dict[str, str]] = {
    "operator": _style("box", "#F9D27D", "#7A4B00", peripheries="2", penwidth="1.6"),
    "operation": _style("box", "#FFFFFF", "#595959", style="filled,rounded"),
    "function": _style("component", "#F0D3E3", "#7D3A5F"),
    "accumulate": _style("ellipse", "#F2F2F2", "#767676", style="filled,dotted"),
    "parameter": _style("cylinder", "#C6E3F7", "#00507D"),
    "buffer": _style("cylinder", "#E3F1FB", "#00507D", style="filled,dashed"),
    "input": _style("hexagon", "#BFE8DA", "#00573F", margin="0.02,0.02"),
    "constant": _style("hexagon", "#EFEFEF", "#595959", margin="0.02,0.02", style="filled,dashed"),
    "saved": _style("note", "#FBF4B0", "#6B6200"),
    "base": _style("note", "#FFFFFF", "#6B6200", style="filled,dashed"),
    "output": _style("ellipse", "#8FD3BC", "#003D2C", penwidth="2.4"),
    "module": _style("folder", "#E4E7EE", "#3A4256"),
    "reference": _style("plain", "#FFFFFF", "#595959", style="filled"),
    "answer": _style("plain", "#FFFFFF", "#595959", style="filled"),
}
EDGES = {
    "flow": {},
    "saved": {"dir": "none", "style": "dashed", "color": "#8A7E00"},
    "view": {"style": "dotted", "arrowhead": "empty"},
}


def to_dot(graph: Graph, *, show_attrs: bool = False) -> str:
    """The graph in DOT.

    Args:
        graph: The graph.
        show_attrs: Write attributes on nodes.

    Example:
        >>> from opsmith.drawing.graph import Edge, Graph, Node
        >>> nodes = (Node("a", "input", "x"), Node("b", "output", "y"))
        >>> graph = Graph("y", "forward", nodes, (Edge("a", "b"),))
        >>> '"a" -> "b"' in to_dot(graph)
        True
    """
    graph = with_references(graph)
    effort = next(effort for most, effort in _EFFORTS if len(graph.edges) <= most)
    text = [
        "digraph {",
        f"  graph [{_listed({'tooltip': graph.title, **_GRAPH, **effort})}, label={_title(graph)}];",
        f"  node [{_listed(_NODE)}];",
        f"  edge [{_listed(_EDGE)}];",
        *_inside(graph, None, show_attrs, "  "),
    ]
    for edge in graph.edges:
        style = dict(EDGES[edge.kind])
        many = f" ×{edge.count}" if edge.count > 1 and not edge.label else ""
        if edge.label or many:
            style["label"] = f" {edge.label}{many}"
        text.append(f"  {_quoted(edge.source)} -> {_quoted(edge.target)} [{_listed(style)}];")
    return "\n".join([*text, "}", ""])


_FONT = "Helvetica,Arial,sans-serif"
_GRAPH = {
    "labelloc": "t",
    "fontname": _FONT,
    "bgcolor": "white",
    "ranksep": "0.35",
    "nodesep": "0.22",
    "margin": "0.2",
}
_NODE = {
    "style": "filled",
    "fontname": _FONT,
    "fontsize": "11",
    "fontcolor": "#111111",
    "margin": "0.12,0.06",
    "height": "0.3",
}
_EDGE = {
    "fontname": _FONT,
    "fontsize": "9",
    "color": "#444444",
    "fontcolor": "#333333",
    "arrowsize": "0.7",
}
_EFFORTS: tuple[tuple[float, dict[str, str]], ...] = (
    (100, {}),
    (500, {"nslimit": "2", "nslimit1": "2", "mclimit": "0.5"}),
    (float("inf"), {"nslimit": "1", "nslimit1": "1", "mclimit": "0.1", "splines": "polyline"}),
)
"""Limits of Graphviz's optimisation by the number of edges: without them a large graph takes minutes."""


def _inside(graph: Graph, group: str | None, attributes: bool, indent: str) -> Iterator[str]:
    """The nodes and subgroups in a group; for None, the nodes and groups outside of all groups."""
    for node in graph.nodes:
        if node.group == group:
            yield f"{indent}{_quoted(node.id)} [{_node(node, attributes)}];"
    for each in graph.groups:
        if each.parent == group:
            yield f"{indent}subgraph {_quoted('cluster_' + each.id)} {{"
            yield f"{indent}  graph [{_cluster(each)}];"
            yield from _inside(graph, each.id, attributes, indent + "  ")
            yield f"{indent}}}"


def _cluster(group: Group) -> str:
    ours = group.kind == "operator"
    style = {
        "style": "rounded,filled" if not ours else "filled,bold",
        "fillcolor": "#FDF3DC" if ours else "#8899BB14",
        "color": "#7A4B00" if ours else "#6A7389",
        "peripheries": "2" if ours else "1",
        "labeljust": "l",
        "margin": "10",
        "fontsize": "11",
        "tooltip": f"{group.label} {group.title}",
    }
    small = f' <FONT POINT-SIZE="9" COLOR="#444444">{_escaped(group.title)}</FONT>' if group.title else ""
    return f"{_listed(style)}, label=<<B>{_escaped(group.label)}</B>{small}>"


def _node(node: Node, attributes: bool) -> str:
    small = "".join(
        f'<BR/><FONT POINT-SIZE="9">{_escaped(line)}</FONT>' for line in lines(node, attributes=attributes)
    )
    strong = node.kind in ("operator", "parameter", "input", "output", "module")
    text = _escaped(heading(node)) or " "
    head = f"<B>{text}</B>" if strong else text
    style = {**STYLES[node.kind], "tooltip": tooltip(node), "id": node.id}
    if node.kind in ("accumulate", "reference"):
        return f'{_listed({**style, **_SMALL})}, label=<<FONT POINT-SIZE="9">{text}</FONT>>'
    return f"{_listed(style)}, label=<{head}{small}>"


_SMALL = {"height": "0.2", "margin": "0.04,0.02"}


def _title(graph: Graph) -> str:
    """Title, summary, notes and legend, above the picture."""
    words = "<BR/>".join(_escaped(line) for line in (graph.summary(), *graph.notes))
    cells = "".join(
        f'<TD BGCOLOR="{STYLES[kind]["fillcolor"]}" COLOR="{STYLES[kind]["color"]}" BORDER="1">'
        f'<FONT POINT-SIZE="9">{WORDS[kind]}</FONT></TD>'
        for kind in kinds_of(graph)
    )
    legend = f'<TR><TD><TABLE BORDER="0" CELLSPACING="4" CELLPADDING="3"><TR>{cells}</TR></TABLE></TD></TR>'
    # Separate rows: lines of different sizes in one cell would touch.
    head = f'<TR><TD><FONT POINT-SIZE="14"><B>{_escaped(graph.title) or " "}</B></FONT></TD></TR>'
    head += f'<TR><TD><FONT POINT-SIZE="10">{words}</FONT></TD></TR>'
    return f'<<TABLE BORDER="0" CELLSPACING="2">{head}{legend if cells else ""}</TABLE>>'


def _listed(attributes: dict[str, str]) -> str:
    return ", ".join(f"{name}={_quoted(value)}" for name, value in attributes.items())


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{xml_text(escaped)}"'


def _escaped(text: str) -> str:
    return xml_text(escape(text, {'"': "&quot;"}))


Format = Literal["svg", "png", "pdf"]

SECONDS = 30.0
"""Time limit of one attempt."""

ATTEMPTS: tuple[tuple[str, dict[str, str]], ...] = (
    ("", {}),
    (
        "laid out with less care and straight lines, because Graphviz took too long",
        {"splines": "line", "nslimit": "1", "nslimit1": "1", "mclimit": "0.05", "concentrate": "false"},
    ),
)
"""Attempts in order: the note about the picture, and additional attributes of the graph."""

_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import pygraphviz
try:
    graph = pygraphviz.AGraph(string=sys.stdin.buffer.read().decode())
except pygraphviz.DotError as error:
    sys.exit(f"it cannot read the graph: {error}")
for pair in sys.argv[3:]:
    name, _, value = pair.partition("=")
    graph.graph_attr[name] = value
sys.stdout.buffer.write(graph.draw(format=sys.argv[2], prog="dot"))
"""


def render(dot: str, form: Format, *, seconds: float = SECONDS) -> tuple[bytes, str]:
    """Render DOT with Graphviz.

    Args:
        dot: The graph.
        form: The format.
        seconds: Time limit of each of two attempts, the second one with less optimisation.

    Returns:
        The file, and a remark about the picture; empty for none.

    Raises:
        MissingExtraError: If pygraphviz is not installed.
        DrawingError: If Graphviz fails, or takes too long.
    """
    folder = pygraphviz_folder()
    more = {"dpi": "144"} if form == "png" else {}
    for note, attributes in ATTEMPTS:
        pairs = [f"{name}={value}" for name, value in {**attributes, **more}.items()]
        # -P: Python does not import modules from the working folder.
        command = [sys.executable, "-P", "-c", _PROGRAM, folder, form, *pairs]
        try:
            done = subprocess.run(
                command, input=dot.encode(), capture_output=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            continue
        if done.returncode:
            output = done.stderr.decode(errors="replace").strip().splitlines()
            raise errors.DrawingError(
                "Graphviz failed",
                got=output[-1] if output else f"exit status {done.returncode}",
                hint="draw an HTML page, which needs no Graphviz, and report this with the graph as `.dot`",
            )
        small = b"too large for cairo-renderer" in done.stderr
        scaled = "scaled down, because it had too many points for a picture" if small else ""
        return done.stdout, "; ".join(filter(None, (note, scaled)))
    raise errors.DrawingError(
        "Graphviz took too long to lay the graph out",
        expected=f"a picture in {seconds:g} seconds, or a less careful picture in the same time",
        hint="fold it, `depth=1`, or draw an HTML page, in which modules unfold one by one",
    )


def pygraphviz_folder() -> str:
    """Return the folder that contains pygraphviz.

    Raises:
        MissingExtraError: If it is not installed.
    """
    found = importlib.util.find_spec("pygraphviz")
    if found is None or found.origin is None:
        raise errors.MissingExtraError(
            "a picture needs the package `pygraphviz`, which brings Graphviz",
            got="no module named 'pygraphviz'",
            hint=f"{install('draw')}; or write `.html`, `.dot` or `.json`, which need no package",
        )
    return str(Path(found.origin).parent.parent)
