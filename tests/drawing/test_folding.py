"""Folding: what a folded picture shows stands for all of the graph, and no graph is too large."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from drawn import network

from opsmith.drawing import Graph, Options, fitting, folded, trace
from opsmith.drawing.graph import Edge, Group, Node, numbered
from opsmith.drawing.grouping import closed_at, depths, fitting_depth, sectioned


@pytest.fixture(scope="module")
def graph() -> Graph:
    return trace(network(), Options(inputs=torch.rand(3, 4), training=True))


@pytest.fixture(scope="module")
def chain() -> Graph:
    """1,003 nodes without a module, all of which use one leaf."""
    leaf = torch.rand(3, requires_grad=True)
    result = leaf
    for number in range(1000):
        result = result.sin() if number % 3 else result * leaf
    return trace(result)


def acyclic(graph: Graph) -> bool:
    """Return whether the graph has no cycle."""
    left = {node.id: {edge.source for edge in graph.edges if edge.target == node.id} for node in graph.nodes}
    while free := {name for name, before in left.items() if not before}:
        left = {name: before - free for name, before in left.items() if name not in free}
    return not left


def test_nothing_is_lost(graph: Graph) -> None:
    for depth in range(depths(graph) + 1):
        small = folded(graph, closed_at(graph, depth))
        assert sum(node.holds for node in small.nodes) == len(graph.nodes)
        assert (small.kept_bytes, small.own_bytes) == (graph.kept_bytes, graph.own_bytes)
        assert acyclic(small)
    assert folded(graph, ()).nodes == graph.nodes


def test_a_folded_module_tells_what_it_holds(graph: Graph) -> None:
    small = folded(graph, closed_at(graph, 0))
    first = next(node for node in small.nodes if node.label == "first")
    assert (first.kind, first.name) == ("module", "Sequential")
    assert first.attributes == (("operators", "opsmith::linear"),)
    ours = next(node for node in small.nodes if node.label == "drawn::plain")
    assert ours.kind == "operator"
    assert small.groups == ()


@pytest.mark.parametrize(
    ("kinds", "kind"),
    [(("saved", "saved"), "saved"), (("view", "view"), "view"), (("saved", "flow"), "flow")],
)
def test_an_edge_between_folded_modules_has_the_kind_that_all_of_its_edges_have(
    kinds: tuple[str, str], kind: str
) -> None:
    nodes = (*(Node(f"a{at}", "operation", "a", group="g") for at in range(2)), Node("b", "output", "b"))
    edges = tuple(Edge(f"a{at}", "b", "", each) for at, each in enumerate(kinds))  # type: ignore[arg-type]
    (edge,) = folded(Graph("", "forward", nodes, edges, (Group("g", "g"),)), {"g"}).edges
    assert (edge.kind, edge.count) == (kind, 2)


def test_edges_between_folded_modules_are_counted() -> None:
    nodes = (*(Node(f"a{at}", "operation", "a", group="g") for at in range(3)), Node("b", "output", "b"))
    graph = Graph(
        "", "forward", nodes, tuple(Edge(f"a{at}", "b", "x") for at in range(3)), (Group("g", "g"),)
    )
    (edge,) = folded(graph, {"g"}).edges
    assert (edge.source, edge.target, edge.count, edge.label) == ("g", "b", 3, "")


def test_as_many_levels_as_fit_are_unfolded(graph: Graph) -> None:
    assert fitting(graph).nodes == graph.nodes
    counts = [len(folded(graph, closed_at(graph, depth)).nodes) for depth in range(depths(graph) + 1)]
    assert counts == sorted(counts)
    assert fitting_depth(graph, counts[1]) == 1
    assert len(fitting(graph, most=counts[1]).nodes) == counts[1]
    assert fitting(graph, depth=0).notes == (
        f"folded: {len(graph.nodes)} nodes in {counts[0]}, 3 groups closed",
    )


def test_a_long_graph_without_modules_is_cut_into_sections(chain: Graph) -> None:
    assert len(chain.nodes) == 1003
    small = fitting(chain)
    assert len(small.nodes) <= 150
    assert acyclic(small)
    assert {node.label for node in small.nodes if node.kind == "module"} >= {"section 1", "section 2"}
    assert sum(node.holds for node in small.nodes) == 1003


def test_modules_that_are_too_many_go_into_sections() -> None:
    nodes = tuple(Node(f"{g}.{at}", "operation", "x", group=f"g{g}") for g in range(400) for at in range(2))
    edges = tuple(Edge(a.id, b.id) for a, b in pairwise(nodes))
    groups = tuple(Group(f"g{g}", f"g{g}") for g in range(400))
    graph = Graph("", "forward", nodes, edges, groups)
    small = fitting(graph)
    assert len(small.nodes) <= 150
    assert {node.kind for node in small.nodes} == {"module"}
    whole = sectioned(graph, 150)
    assert {group.kind for group in whole.groups if group.parent is None} == {"section"}


def test_numbers_tell_calls_of_one_name_apart() -> None:
    assert numbered(["a", "b", "a"]) == ["a #1", "b", "a #2"]
