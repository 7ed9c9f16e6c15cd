"""References in the place of lines: lines across the whole picture can be followed by nobody.

They also cost Graphviz most of its time: a hundred lines from one tensor to as many operations take minutes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from opsmith.drawing.captions import heading
from opsmith.drawing.graph import Edge, Graph, Node

FEW, MANY = 3, 12
"""How many lines leave a tensor, and how many leave an operation or lead to one, in a picture."""
_TENSORS = ("parameter", "buffer", "input", "constant", "accumulate", "saved")


def with_references(graph: Graph) -> Graph:
    """The graph in which what many use, or what uses many, stands beside each of them, as a reference.

    A reference to what comes before is called `source@target`, one to what comes after `target@@source`.
    """
    uses = Counter(edge.source for edge in graph.edges)
    needs = Counter(edge.target for edge in graph.edges)
    leaves = {edge.target: edge.source for edge in graph.edges}
    wide = {node.id for node in graph.nodes if uses[node.id] > (FEW if node.kind in _TENSORS else MANY)}
    deep = {node.id for node in graph.nodes if needs[node.id] > MANY}
    made: dict[str, Node] = {}
    edges: list[Edge] = []
    for edge in graph.edges:
        source, target = graph.by_id[edge.source], graph.by_id[edge.target]
        if edge.source in wide:
            named = graph.by_id[leaves[source.id]] if source.kind == "accumulate" else source
            name = f"{source.id}@{target.id}"
            made.setdefault(name, Node(name, "reference", f"↑ {heading(named)}", group=target.group))
            edges.append(replace(edge, source=name))
        elif edge.target in deep:
            name = f"{target.id}@@{source.id}"
            made.setdefault(name, Node(name, "reference", f"↓ {heading(target)}", group=source.group))
            edges.append(replace(edge, target=name))
        else:
            edges.append(edge)
    nodes = [_told(node, uses, needs, wide, deep) for node in graph.nodes]
    return replace(graph, nodes=(*nodes, *made.values()), edges=tuple(edges))


def _told(node: Node, uses: Counter[str], needs: Counter[str], wide: set[str], deep: set[str]) -> Node:
    told = [("is used", f"{uses[node.id]} times")] * (node.id in wide)
    told += [("uses", f"{needs[node.id]} others")] * (node.id in deep)
    return replace(node, attributes=(*node.attributes, *told)) if told else node
