"""Folding: a group as one node, so that a large graph can be looked at."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

from opsmith.drawing.graph import Edge, Graph, Group, Node, ancestry, counted

MOST = 150
"""Nodes that a picture has at most, unless it is asked for more."""


def folded(graph: Graph, closed: Collection[str]) -> Graph:
    """The graph with these groups as one node each, which keeps what their nodes keep."""
    parents = {group.id: group.parent for group in graph.groups}
    stands: dict[str, str] = {}
    for node in graph.nodes:
        outermost = [each for each in ancestry(node.group, parents) if each in closed]
        stands[node.id] = outermost[-1] if outermost else node.id
    held: dict[str, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        held[stands[node.id]].append(node)
    by_id = {group.id: group for group in graph.groups}
    nodes = [
        nodes[0] if name == nodes[0].id else _as_node(by_id[name], nodes, graph)
        for name, nodes in held.items()
    ]
    counts: dict[tuple[str, str], list[Edge]] = defaultdict(list)
    for edge in graph.edges:
        ends = (stands[edge.source], stands[edge.target])
        if ends[0] != ends[1]:
            counts[ends].append(edge)
    edges = []
    for (source, target), between in counts.items():
        if source in by_id or target in by_id:
            kinds = {edge.kind for edge in between}
            kind = "saved" if kinds == {"saved"} else "view" if kinds == {"view"} else "flow"
            label = between[0].label if len(between) == 1 else ""
            edges.append(Edge(source, target, label, kind, len(between)))  # type: ignore[arg-type]
        else:
            edges += between
    shown = [
        group for group in graph.groups if not any(each in closed for each in ancestry(group.id, parents))
    ]
    return replace(graph, nodes=tuple(nodes), edges=tuple(edges), groups=tuple(shown))


def _as_node(group: Group, nodes: list[Node], graph: Graph) -> Node:
    inside = {node.id for node in nodes}
    leaving = {edge.source for edge in graph.edges if edge.source in inside and edge.target not in inside}
    last = [node for node in nodes if node.id in leaving] or nodes[-1:]
    return Node(
        group.id,
        "operator" if group.kind == "operator" else "module",
        group.label,
        name=group.title,
        forms=last[-1].forms,
        group=group.parent,
        attributes=tuple(("operators", each) for each in operators_among(nodes)),
        saved=tuple(each for node in nodes for each in node.saved),
        where=last[-1].where,
        source=last[-1].source,
        holds=len(nodes),
        overwritten=any(node.overwritten for node in nodes),
    )


def operators_among(nodes: Collection[Node]) -> list[str]:
    """The operators of opsmith among some nodes, each with how often it is there."""
    counts = Counter(node.label for node in nodes if node.kind == "operator")
    return [f"{name} ×{count}" if count > 1 else name for name, count in counts.items()]


def closed_at(graph: Graph, depth: int) -> set[str]:
    """The groups that are folded where as many levels as this are unfolded."""
    parents = {group.id: group.parent for group in graph.groups}
    return {group.id for group in graph.groups if len(ancestry(group.id, parents)) > depth}


def depths(graph: Graph) -> int:
    """How many levels of groups there are."""
    parents = {group.id: group.parent for group in graph.groups}
    return max((len(ancestry(group.id, parents)) for group in graph.groups), default=0)


def fitting(graph: Graph, depth: int | None = None, most: int = MOST) -> Graph:
    """The graph folded as deep as it has to be, with a note that says so.

    Args:
        graph: The graph.
        depth: How many levels of modules to unfold; None: as many as leave at most `most` nodes. Where there
            are more even so, sections are made of what comes one after the other.
        most: How many nodes there may be.
    """
    if depth is None:
        graph = graph if len(folded(graph, closed_at(graph, 0)).nodes) <= most else sectioned(graph, most)
        depth = fitting_depth(graph, most)
    found = folded(graph, closed_at(graph, depth))
    if len(found.nodes) == len(graph.nodes):
        return found
    hidden = sum(node.holds > 1 or node.kind == "module" for node in found.nodes)
    note = f"folded: {counted(len(graph.nodes), 'node')} in {len(found.nodes)}"
    note += f", {counted(hidden, 'group')} closed"
    return replace(found, notes=(*found.notes, note))


def fitting_depth(graph: Graph, most: int) -> int:
    """How many levels can be unfolded so that there are at most so many nodes; 0 if there are more anyway."""
    levels = range(depths(graph), 0, -1)
    return next((each for each in levels if len(folded(graph, closed_at(graph, each)).nodes) <= most), 0)


def sectioned(graph: Graph, most: int) -> Graph:
    """The graph with its outermost nodes and groups in sections, so that folded there are few."""
    parents = {group.id: group.parent for group in graph.groups}
    item = {node.id: (ancestry(node.group, parents) or [node.id])[-1] for node in graph.nodes}
    order = _in_order(graph, item)
    size = max(len(order) // max(most // 6, 1), 2)
    sections: list[Group] = []
    within: dict[str, str] = {}
    for start in range(0, len(order), size):
        part = order[start : start + size]
        name = f"s{len(sections)}"
        sections.append(Group(name, f"section {len(sections) + 1}", "section"))
        within |= dict.fromkeys(part, name)
    groups = [replace(group, parent=group.parent or within[group.id]) for group in graph.groups]
    nodes = [replace(node, group=node.group or within[node.id]) for node in graph.nodes]
    return replace(graph, nodes=tuple(nodes), groups=(*sections, *groups))


def _in_order(graph: Graph, item: dict[str, str]) -> list[str]:
    """The outermost nodes and groups, each after what leads to it."""
    before: dict[str, set[str]] = {each: set() for each in item.values()}
    for edge in graph.edges:
        if item[edge.source] != item[edge.target]:
            before[item[edge.target]].add(item[edge.source])
    try:
        return list(TopologicalSorter(before).static_order())
    except CycleError:  # what is computed twice by one module, and something else in between
        return list(before)
