"""Groups as they help a reader: leaves stand with those who use them, and nothing is in a group alone."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from opsmith.drawing.graph import Graph, Group, Node, ancestry

_TENSORS = ("parameter", "buffer", "constant", "accumulate", "saved")
"""What belongs to who uses it; inputs come from outside of all modules."""


def nested(graph: Graph) -> Graph:
    """The graph with every leaf in the innermost group of all its users, without groups that say nothing."""
    if not graph.groups:
        return graph
    graph = replace(graph, groups=_parents_first(graph.groups))
    return without_empty(_without_lone(_with_leaves(graph)))


def without_empty(graph: Graph) -> Graph:
    """The graph without groups in which there is nothing."""
    parents = {group.id: group.parent for group in graph.groups}
    full = {each for node in graph.nodes for each in ancestry(node.group, parents)}
    return replace(graph, groups=tuple(group for group in graph.groups if group.id in full))


def _parents_first(groups: tuple[Group, ...]) -> tuple[Group, ...]:
    parents = {group.id: group.parent for group in groups}
    return tuple(sorted(groups, key=lambda group: len(ancestry(group.parent, parents))))


def _with_leaves(graph: Graph) -> Graph:
    parents = {group.id: group.parent for group in graph.groups}
    users: dict[str, list[str]] = defaultdict(list)
    sources: dict[str, list[str]] = defaultdict(list)
    for edge in graph.edges:
        users[edge.source].append(edge.target)
        sources[edge.target].append(edge.source)
    placed = {node.id: node.group for node in graph.nodes}
    for node in reversed(graph.nodes):  # who uses it comes later, and is in its place by now
        if node.kind in _TENSORS and node.group is None and users[node.id]:
            placed[node.id] = _common([placed[user] for user in users[node.id]], parents)
    return replace(graph, nodes=tuple(replace(node, group=placed[node.id]) for node in graph.nodes))


def _common(groups: list[str | None], parents: dict[str, str | None]) -> str | None:
    """The innermost group that all of these are in."""
    paths = [ancestry(group, parents) for group in groups]
    return next((each for each in paths[0] if all(each in path for path in paths)), None)


def _without_lone(graph: Graph) -> Graph:
    """Without groups that hold nothing, or one node, which takes the name."""
    parents = {group.id: group.parent for group in graph.groups}
    groups = {group.id: group for group in graph.groups}
    nodes = {node.id: node for node in graph.nodes}
    for group in reversed(graph.groups):  # the innermost first
        held = [node for node in nodes.values() if node.group == group.id]
        inside = [each for each in groups.values() if each.parent == group.id]
        if len(held) + len(inside) > 1 or group.kind != "module":
            continue
        del groups[group.id]
        for node in held:
            nodes[node.id] = _named(replace(node, group=parents[group.id]), group)
        for each in inside:
            parents[each.id] = group.parent
            groups[each.id] = replace(each, parent=group.parent)
    return replace(
        graph,
        nodes=tuple(nodes[node.id] for node in graph.nodes),
        groups=tuple(groups[group.id] for group in graph.groups if group.id in groups),
    )


def _named(node: Node, group: Group) -> Node:
    return node if node.name or node.kind in (*_TENSORS, "input") else replace(node, name=group.label)
