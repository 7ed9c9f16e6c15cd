"""Captions of nodes, shared by all renderers."""

from __future__ import annotations

from collections.abc import Iterator

from opsmith.drawing.graph import Graph, Kind, Node, format_bytes

WORDS: dict[Kind, str] = {
    "operator": "operator of opsmith",
    "operation": "operation",
    "function": "autograd.Function",
    "accumulate": "sum of a leaf's gradients",
    "parameter": "parameter",
    "buffer": "buffer",
    "input": "input",
    "constant": "constant",
    "saved": "saved tensor",
    "base": "base of a view",
    "output": "output",
    "module": "folded",
    "answer": "no formula",
    "reference": "reference to a tensor",
}
"""Description of each kind, in legends and for screen readers."""


def heading(node: Node) -> str:
    """Return the first line: the label of the node, or its kind if it has no label."""
    return node.label or WORDS[node.kind]


def lines(node: Node, *, attributes: bool = False) -> Iterator[str]:
    """The lines below the heading."""
    if node.name and node.name != node.label:
        yield node.name
    if node.forms:
        more = f" + {len(node.forms) - 1} more" if len(node.forms) > 1 else ""
        yield f"{node.forms[0]}{more}"
    if node.holds > 1:
        yield f"{node.holds} nodes"
        yield from (value for name, value in node.attributes if name == "operators")
    if node.kind == "saved" and node.saved:
        yield f"{format_bytes(node.saved[0].bytes)}, {node.saved[0].role} {node.saved[0].of}".rstrip()
    elif node.own_bytes:
        yield f"keeps {format_bytes(node.own_bytes)}"
    if node.overwritten:
        yield "saved, and modified later"
    if attributes or node.kind == "answer":
        for name, value in node.attributes if node.holds == 1 else ():
            yield f"{name}: {value}"


def kinds_of(graph: Graph) -> list[Kind]:
    """The kinds of the nodes in a graph, in the order of `WORDS`."""
    present = {node.kind for node in graph.nodes}
    return [kind for kind in WORDS if kind in present]


def tooltip(node: Node) -> str:
    """The tooltip of a node."""
    text = [heading(node), *lines(node, attributes=True)]
    text += [f"{node.where}: {node.source}" if node.source else node.where] * bool(node.where)
    text += [f"saved {each}" for each in node.saved[:8]]
    text += [f"and {len(node.saved) - 8} more"] * (len(node.saved) > 8)
    return "\n".join(text)
