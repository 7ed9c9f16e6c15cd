"""Graphs beside torchviz's: every node, every edge and every saved tensor of those is in ours."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import Square, network, row_e1
from torch import Tensor

import opsmith
from opsmith.drawing import Graph

NODE = re.compile(r'^\t(\d+) \[label="?(.*?)"?( fillcolor=(\w+))?\]$', re.DOTALL)
EDGE = re.compile(r"^\t(\d+) -> (\d+)(.*)$")


def of_torchviz(tensors: Any, **options: Any) -> tuple[Counter[str], Counter[tuple[str, str]]]:
    """Labels of torchviz's nodes, and the labels that its arrows join: names, and shapes of tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses distutils
        from torchviz import make_dot

        dot = make_dot(tensors, **options)
    labels: dict[str, str] = {}
    edges = []
    for line in dot.body:
        node, edge = NODE.match(line.rstrip("\n")), EDGE.match(line.rstrip("\n"))
        if node is not None:
            labels[node[1]] = _label(node[2])
        elif edge is not None and "dir=none" not in edge[3]:
            edges.append((edge[1], edge[2]))
    assert labels
    assert edges
    return Counter(labels.values()), Counter((labels[a], labels[b]) for a, b in edges)


def _label(text: str) -> str:
    shape = re.search(r"\(([\d, ]*)\)$", text)
    return text.split("\n")[0] if shape is None else f"[{', '.join(re.findall(r'[0-9]+', shape[1]))}]"


def of_ours(graph: Graph) -> tuple[Counter[str], Counter[tuple[str, str]]]:
    labels = {
        node.id: node.recorded or f"[{', '.join(map(str, node.forms[0].shape))}]" for node in graph.nodes
    }
    edges = Counter((labels[e.source], labels[e.target]) for e in graph.edges if e.kind != "saved")
    return Counter(labels.values()), edges


def composed() -> Tensor:
    return row_e1()[0]


def function() -> Tensor:
    square: Any = Square.apply
    result: Tensor = square(torch.rand(3, requires_grad=True)).exp()
    return result


def a_view() -> Tensor:
    return torch.rand(3, 4, requires_grad=True).exp()[1:]


def several() -> tuple[Tensor, ...]:
    x = torch.rand(3, requires_grad=True)
    return (x.exp(), x.sin() * x, x.sum())


def trained() -> Tensor:
    return network()(torch.rand(3, 4))["y"]


@pytest.mark.parametrize("show_saved", [False, True], ids=["plain", "saved"])
@pytest.mark.parametrize("make", [composed, function, a_view, several, trained])
def test_every_node_and_edge_of_torchviz_is_there(
    make: Callable[[], Any], show_saved: bool, tmp_path: Path
) -> None:
    tensors = make()
    graph = opsmith.draw(tensors, tmp_path / "graph.json", show_saved=show_saved)
    nodes, edges = of_torchviz(tensors, show_attrs=False, show_saved=show_saved)
    ours, between = of_ours(graph)
    if show_saved:  # torchviz has a node for each time that a tensor is saved, ours one for each tensor
        nodes, ours = Counter(set(nodes)), Counter(set(ours))
    assert nodes - ours == Counter()
    assert edges - between == Counter()


def test_row_e1_has_operators_shapes_and_saved_tensors(tmp_path: Path) -> None:
    y, named = row_e1()
    graph = opsmith.draw(y, tmp_path / "graph.json", names=named)
    assert [node.label for node in graph.nodes if node.kind == "operator"] == ["opsmith::mul", "opsmith::add"]
    assert {node.label: str(node.forms[0]) for node in graph.nodes if node.kind == "input"} == {
        "w": "[1, 2] float32",
        "b": "[1] float32",
        "x": "[1, 2] float32",
    }
    (saved,) = next(node.saved for node in graph.nodes if node.label == "opsmith::mul")
    assert (saved.name, saved.bytes, saved.role, saved.of) == ("y", 8, "input", "x")


@pytest.mark.parametrize("make", [composed, several, trained])
def test_what_torchviz_reads_as_attributes_is_there(make: Callable[[], Any], tmp_path: Path) -> None:
    tensors = make()
    graph = opsmith.draw(tensors, tmp_path / "graph.json")
    roots = tensors if isinstance(tensors, tuple) else (tensors,)
    pending, seen = [each.grad_fn for each in roots], set()
    theirs: Counter[tuple[str, str]] = Counter()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [behind for behind, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_") and getattr(node, name) is not None:
                theirs[type(node).__name__, name.removeprefix("_saved_").replace("_sym_", "_")] += 1
    ours: Counter[tuple[str, str]] = Counter()
    for each in graph.nodes:
        ours.update((each.recorded, name) for name, _ in each.attributes)
        ours.update((each.recorded, saved.name.partition("[")[0]) for saved in each.saved)
    assert theirs
    assert theirs - ours == Counter()
