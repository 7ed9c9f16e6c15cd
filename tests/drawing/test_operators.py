"""The picture of an operator: its reference, what is saved, its formulas; of every kind of operator."""

from __future__ import annotations

import pytest
import torch
from drawn import derived, joint, opaque, plain, several, square
from torch import Tensor

import opsmith
from opsmith.drawing import Graph, Options, folded, trace
from opsmith.drawing.grouping import with_references
from opsmith.pages.sections import saved_tensors


def paths(graph: Graph) -> set[tuple[str, str]]:
    return {(graph.by_id[edge.source].label, graph.by_id[edge.target].label) for edge in graph.edges}


def groups(graph: Graph) -> dict[str, str]:
    return {group.label: group.kind for group in graph.groups}


def answers(graph: Graph) -> dict[str, str]:
    return {node.label: dict(node.attributes)["is"] for node in graph.nodes if node.kind == "answer"}


def test_linear() -> None:
    graph = trace(opsmith.ops.linear)
    assert groups(graph) == {
        "opsmith::linear": "operator",
        "backward": "part",
        "saved for the backward": "part",
        "gradient of x": "part",
        "gradient of weight": "part",
        "gradient of bias": "part",
    }
    assert {("x", "matmul"), ("bias", "add"), ("add", "result"), ("weight", "weight")} <= paths(graph)
    saved = [str(each) for node in graph.nodes for each in node.saved]
    assert saved == ["x [4, 3] float32 48 B (input x)", "weight [2, 3] float32 24 B (input weight)"]
    assert ("summed to the input", "gradient of bias") in paths(graph)
    assert (graph.kept_bytes, graph.own_bytes) == (72, 0)
    assert opsmith.ops.linear.explain(torch.ones(1, 2), torch.ones(1, 2)).saved == ("x", "weight")


def test_a_joint_formula_is_one_group_and_hidden_results_are_told() -> None:
    graph = trace(joint)
    assert "gradients of x, weight" in groups(graph)
    outputs = {node.label: dict(node.attributes) for node in graph.nodes if node.kind == "output"}
    assert list(outputs) == ["result", "rstd", "gradient of x", "gradient of weight"]
    assert outputs["rstd"] == {"hidden": "callers do not see it"}
    assert [node.label for node in graph.nodes if node.kind == "saved"] == ["x", "weight", "rstd"]
    assert graph.notes == ("on a call with power=1",)
    assert trace(joint, Options(inputs=(torch.ones(2, 3), torch.ones(3), 2))).notes == (
        "on a call with power=2",
    )


@opsmith.operator("drawn::distance")
def distance(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return x * y * z


@distance.gradients
def _(grad: Tensor, x: Tensor, y: Tensor, z: Tensor, grads_needed: frozenset[str]) -> dict[str, Tensor]:
    shared = torch.exp(grad)
    found = {"x": shared * y * z, "y": shared * x * z, "z": shared * x * y}
    return {name: value for name, value in found.items() if name in grads_needed}


distance.samples(lambda make: [(make(3), make(3), make(3))])


def test_a_joint_formula_is_drawn_once_as_it_runs_once() -> None:
    graph = trace(distance)
    assert [node.label for node in graph.nodes].count("exp") == 1
    ends = {b for a, b in paths(graph) if b.startswith("gradient of")}
    assert ends == {"gradient of x", "gradient of y", "gradient of z"}
    (shared,) = [node.id for node in graph.nodes if node.label == "exp"]
    assert len([edge for edge in graph.edges if edge.source == shared]) == 3


def test_a_hidden_result_counts_as_the_backward_counts_it() -> None:
    graph = trace(joint)
    saved = saved_tensors(joint)
    assert graph.summary().partition("; ")[2] == saved.summary
    assert "16 B of it intermediate results" in saved.summary
    assert [str(each) for node in graph.nodes for each in node.saved][-1] == "rstd [4, 1] float32 16 B (rstd)"


def test_the_summary_is_the_same_however_it_is_folded() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    graph = trace(model, Options(inputs=torch.ones(1, 3)))
    every = {group.id for group in graph.groups}
    assert folded(graph, every).summary() == graph.summary()
    assert with_references(graph).summary() == graph.summary()


@pytest.mark.parametrize(
    ("operator", "words"),
    [
        (plain, {"gradient of every input": "ordinary autograd of the reference"}),
        (derived, {"gradient of x": "derived: the reference, run again", "gradient of y": "opsmith.zero"}),
        (square, {"gradient of x": "backward of Square, tests/drawing/drawn.py:80"}),
        (opaque, {}),
        (several, {}),
    ],
    ids=["plain", "derived", "adopted", "opaque", "several"],
)
def test_what_no_formula_computes_is_said(operator: object, words: dict[str, str]) -> None:
    assert answers(trace(operator)) == words


def test_an_adopted_class_is_one_call_that_keeps_what_it_keeps() -> None:
    graph = trace(square)
    (call,) = [node for node in graph.nodes if node.kind == "operation"]
    assert call.label == "forward of Square"
    assert [str(each) for each in call.saved] == ["saved 0 [3] float32 12 B (input x)"]


def test_a_title_stands_above_an_operator_too() -> None:
    assert trace(square, Options(title="squares")).title == "squares"


def test_an_opaque_operator_is_one_call() -> None:
    graph = trace(opaque)
    assert paths(graph) == {("x", "opaque"), ("opaque", "result"), ("grad", "mul"), ("mul", "gradient of x")}


def test_lists_are_drawn_item_by_item() -> None:
    graph = trace(several)
    assert [node.label for node in graph.nodes if node.kind == "input"][:2] == ["xs[0]", "xs[1]"]
    assert [node.label for node in graph.nodes if node.kind == "output"][-2:] == [
        "gradient of xs[0]",
        "gradient of xs[1]",
    ]


@pytest.mark.parametrize(
    "name", ["exp", "mul", "add", "linear", pytest.param("involution", marks=pytest.mark.slow)]
)
def test_every_bundled_operator_is_drawn(name: str) -> None:
    graph = trace(getattr(opsmith.ops, name))
    assert graph.title == f"opsmith::{name}"
    assert groups(graph)[f"opsmith::{name}"] == "operator"
    ends = {edge.source for edge in graph.edges}
    assert all(node.kind in ("output", "answer", "saved") for node in graph.nodes if node.id not in ends)
