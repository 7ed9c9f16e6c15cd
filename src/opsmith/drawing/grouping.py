"""Groups of a graph: nested by use, folded to a node, cut into sections; references replace long edges."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

from opsmith.drawing.captions import heading
from opsmith.drawing.graph import Edge, Graph, Group, Node, counted

_TENSORS = ("parameter", "buffer", "constant", "accumulate", "saved")
"""Kinds that belong to the group of their users; inputs belong to none."""


def nested(graph: Graph) -> Graph:
    """The graph with every leaf in the innermost group of its users, and no group of fewer than two nodes."""
    if not graph.groups:
        return graph
    groups = sorted(graph.groups, key=lambda group: len(graph.ancestry(group.id)))  # parents first
    graph = replace(graph, groups=tuple(groups))
    return without_empty(_without_lone(_with_leaves(graph)))


def without_empty(graph: Graph) -> Graph:
    """The graph without empty groups."""
    full = {each for node in graph.nodes for each in graph.ancestry(node.group)}
    return replace(graph, groups=tuple(group for group in graph.groups if group.id in full))


def _with_leaves(graph: Graph) -> Graph:
    users: dict[str, list[str]] = defaultdict(list)
    for edge in graph.edges:
        users[edge.source].append(edge.target)
    placed = {node.id: node.group for node in graph.nodes}
    for node in reversed(graph.nodes):  # its users are later nodes, whose group is already known
        if node.kind in _TENSORS and node.group is None and users[node.id]:
            placed[node.id] = _common([graph.ancestry(placed[user]) for user in users[node.id]])
    return replace(graph, nodes=tuple(replace(node, group=placed[node.id]) for node in graph.nodes))


def _common(paths: list[list[str]]) -> str | None:
    """The innermost group that all of these ancestries contain."""
    return next((each for each in paths[0] if all(each in path for path in paths)), None)


def _without_lone(graph: Graph) -> Graph:
    """Remove module groups of at most one node; the node gets their name."""
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


MAX_NODES = 150
"""Largest number of nodes in a picture, unless `depth` is given."""


def folded(graph: Graph, closed: Collection[str]) -> Graph:
    """The graph with each of these groups folded to one node, which has the saved tensors of its nodes."""
    representative: dict[str, str] = {}
    for node in graph.nodes:
        outermost = [each for each in graph.ancestry(node.group) if each in closed]
        representative[node.id] = outermost[-1] if outermost else node.id
    held: dict[str, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        held[representative[node.id]].append(node)
    by_id = {group.id: group for group in graph.groups}
    nodes = [
        nodes[0] if name == nodes[0].id else _as_node(by_id[name], nodes, graph)
        for name, nodes in held.items()
    ]
    counts: dict[tuple[str, str], list[Edge]] = defaultdict(list)
    for edge in graph.edges:
        ends = (representative[edge.source], representative[edge.target])
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
    shown = [group for group in graph.groups if not any(each in closed for each in graph.ancestry(group.id))]
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
    """The operators of opsmith among some nodes, with their counts."""
    counts = Counter(node.label for node in nodes if node.kind == "operator")
    return [f"{name} ×{count}" if count > 1 else name for name, count in counts.items()]


def closed_at(graph: Graph, depth: int) -> set[str]:
    """The groups below this depth, which are folded if this number of levels is unfolded."""
    return {group.id for group in graph.groups if len(graph.ancestry(group.id)) > depth}


def depths(graph: Graph) -> int:
    """The number of levels of groups."""
    return max((len(graph.ancestry(group.id)) for group in graph.groups), default=0)


def fitting(graph: Graph, depth: int | None = None, most: int = MAX_NODES) -> Graph:
    """The graph folded to a size that fits a picture, with a note about it.

    Args:
        graph: The graph.
        depth: Number of levels of modules to unfold; None for the largest number with at most `most`
            nodes; a larger graph is cut into sections.
        most: Largest number of nodes.
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
    """The largest number of unfolded levels with at most `most` nodes; 0 if there is none."""
    levels = range(depths(graph), 0, -1)
    return next((each for each in levels if len(folded(graph, closed_at(graph, each)).nodes) <= most), 0)


def sectioned(graph: Graph, most: int) -> Graph:
    """The graph with its outermost nodes and groups in a small number of sections."""
    item = {node.id: (graph.ancestry(node.group) or [node.id])[-1] for node in graph.nodes}
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
    """The outermost nodes and groups in topological order."""
    before: dict[str, set[str]] = {each: set() for each in item.values()}
    for edge in graph.edges:
        if item[edge.source] != item[edge.target]:
            before[item[edge.target]].add(item[edge.source])
    try:
        return list(TopologicalSorter(before).static_order())
    except CycleError:  # a module that runs twice, with a different module in between
        return list(before)


FEW, MANY = 3, 12
"""Largest number of edges in a picture: that leave a tensor, and that leave or enter an operation."""
_REFERABLE = ("parameter", "buffer", "input", "constant", "accumulate", "saved")


def with_references(graph: Graph) -> Graph:
    """The graph with references instead of long edges: each user of a node with many users has one.

    A reader cannot follow edges across the whole picture, and Graphviz spends most of its time on them. A
    reference to an earlier node has the id `source@target`, one to a later node `target@@source`.
    """
    uses = Counter(edge.source for edge in graph.edges)
    needs = Counter(edge.target for edge in graph.edges)
    leaves = {edge.target: edge.source for edge in graph.edges}
    wide = {node.id for node in graph.nodes if uses[node.id] > (FEW if node.kind in _REFERABLE else MANY)}
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
    nodes = [_with_counts(node, uses, needs, wide, deep) for node in graph.nodes]
    return replace(graph, nodes=(*nodes, *made.values()), edges=tuple(edges))


def _with_counts(node: Node, uses: Counter[str], needs: Counter[str], wide: set[str], deep: set[str]) -> Node:
    more = [("is used", f"{uses[node.id]} times")] * (node.id in wide)
    more += [("uses", f"{needs[node.id]} others")] * (node.id in deep)
    return replace(node, attributes=(*node.attributes, *more)) if more else node
