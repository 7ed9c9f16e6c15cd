"""Every form of operator: optional tensors, lists, several results, attributes, types, nested operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import onnx_operators as of
import pytest
import torch
from onnx_files import Made, attributes, off
from onnx_operators import Calls

import opsmith

Exported = Callable[..., Made]
torch.manual_seed(0)
X, W, B = torch.randn(4, 6), torch.randn(3, 6), torch.randn(3)


@pytest.mark.slow
def test_optional_tensors_present_and_absent_have_bodies_of_their_own(export: Exported) -> None:
    def all_four(x: Any, w: Any, b: Any) -> Any:
        both = of.affine(x, w, b, b) + of.affine(x, w)
        return both + of.affine(x, w, b) + of.affine(x, w, None, b) + of.affine(x, w, b)

    made = export(Calls(all_four), (X, W, B), input_names=["x", "w", "b"], dynamic={"x": {0: "n"}})
    assert [list(node.input) for node in made.ours()] == [
        ["x", "w", "b", "b"],
        ["x", "w"],
        ["x", "w", "b"],
        ["x", "w", "", "b"],
    ]
    assert [node.op_type for node in made.ours()] == ["affine", "affine_2", "affine_3", "affine_4"]
    assert {node.overload for node in made.ours()} == {""}
    assert made.export.nodes == {"nodes::affine": 4}
    assert off(made.in_evaluator(X, W, B), all_four(X, W, B)) <= 1e-6


@pytest.mark.slow
def test_equal_bodies_are_shared(export: Exported) -> None:
    layers = torch.nn.Sequential(*(opsmith.ops.Linear(6, 6) for _ in range(5)), opsmith.ops.Linear(6, 2))
    made = export(layers.eval(), X, dynamic={"input": {0: "n"}})
    assert made.export.nodes == {"opsmith::linear": 6}
    assert [each.name for each in made.model.functions] == ["linear"]


@pytest.mark.slow
def test_calls_that_differ_in_attributes_alone_stay_apart(export: Exported) -> None:
    made = export(Calls(lambda x: of.moments(x)[0] + of.moments(x, 3.0)[0]), X)
    assert [attributes(node)["scale"] for node in made.ours()] == [1.0, 3.0]
    assert [node.op_type for node in made.ours()] == ["moments", "moments_2"]


def test_several_results_and_hidden_ones(export: Exported) -> None:
    made = export(of.moments, (X, 2.5))
    assert made.export.outputs == ("mean", "spread")
    assert off(made.in_runtime(X), of.moments(X, 2.5)) <= 1e-6
    made = export(torch.nn.Sequential(torch.nn.Linear(6, 6), Calls(of.normalised)).eval(), X)
    assert len(made.ours()[0].output) == 1


@pytest.mark.slow
def test_results_that_are_not_always_there(export: Exported) -> None:
    model = Calls(lambda x: (of.maybe(x)[0], *of.maybe(x, True)))
    made = export(model, X)
    assert [len(node.output) for node in made.ours()] == [1, 2]
    assert off(made.in_runtime(X), model(X)) == 0


@pytest.mark.slow
def test_lists_of_tensors(export: Exported) -> None:
    model = Calls(lambda xs: of.weighted([each + 1 for each in xs], [1.0, -2.0, 0.5]))
    made = export(model, ([X, 2 * X, 3 * X],), input_names=["a", "b", "c"])
    (node,) = made.ours()
    assert len(node.input) == 3
    assert attributes(node) == {"xs_count": 3, "weights": [1.0, -2.0, 0.5]}
    assert off(made.in_runtime(X, 2 * X, 3 * X), model([X, 2 * X, 3 * X])) <= 1e-6


@pytest.mark.slow
def test_a_list_of_results(export: Exported) -> None:
    model = Calls(lambda x: [part - 1 for part in of.halves(x, 3)][1:])
    made = export(model, X)
    assert len(made.ours()[0].output) == 3
    assert off(made.in_runtime(X), model(X)) == 0
    assert export(of.halves, X).export.outputs == ("result_0", "result_1")


def test_every_kind_of_attribute(export: Exported) -> None:
    given: dict[str, Any] = {
        "word": "mean",
        "mode": of.Mode.DOWN,
        "choice": "b",
        "flag": False,
        "steps": [1, 2],
        "flags": [True, False],
        "pair": (2, 3),
        "kind": torch.float64,
        "number": 2.5,
    }
    made = export(of.described, X, kwargs=given)
    assert attributes(made.ours()[0]) == {
        "count": 2,
        "rate": 0.5,
        "flag": 0,
        "word": "mean",
        "mode": "DOWN",
        "choice": "b",
        "kind": "float64",
        "number": 2.5,
        "imaginary": [0.0, 2.0],
        "steps": [1, 2],
        "rates": [0.25, 0.5],
        "flags": [1, 0],
        "pair": [2, 3],
    }
    assert off(made.in_runtime(X), of.described(X, **given)) <= 1e-6
    node = export(of.described, X).ours()[0]
    assert attributes(node)["number"] == 3
    assert attributes(node)["pair"] == [1, 1]
    assert "steps" not in attributes(node)


def test_operators_within_a_reference_are_nodes_within_its_function(export: Exported) -> None:
    made = export(of.outer, X, dynamic={"x": {0: "n"}})
    assert made.export.nodes == {"nodes::outer": 1}
    inner = next(each for each in made.model.functions if each.name == "outer")
    assert {(node.domain, node.op_type) for node in inner.node if node.domain} == {
        ("opsmith", "exp"),
        ("nodes", "moments"),
    }
    assert off(made.in_evaluator(X), of.outer(X)) <= 1e-6
    assert not export(of.outer, X, body="inline").ours()


@pytest.mark.slow
def test_constants_of_a_reference(export: Exported) -> None:
    assert (
        off(export(of.constant, torch.ones(2, 3)).in_runtime(torch.ones(2, 3)), of.constant(torch.ones(2, 3)))
        == 0
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_types(export: Exported, dtype: torch.dtype) -> None:
    args = [each.to(dtype) for each in (X, W, B)]
    made = export(of.affine, tuple(args), dynamic={"x": {0: "n"}})
    assert made.export.verified
    assert off(made.in_runtime(*args), of.affine(*args)) <= 8 * torch.finfo(dtype).eps


@pytest.mark.slow
def test_bfloat16_is_written_where_onnx_runtime_has_no_kernels_for_it(export: Exported) -> None:
    args = tuple(each.bfloat16() for each in (X, W, B))
    made = export(of.affine, args, verify=False)
    assert {each.type.tensor_type.elem_type for each in made.model.graph.input} == {onnx.TensorProto.BFLOAT16}
    assert not made.export.verified


@pytest.mark.slow
def test_other_layers_between_and_two_dynamic_axes(export: Exported) -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = opsmith.ops.Linear(8, 24)
            self.norm = torch.nn.LayerNorm(8)

        def forward(self, tokens: Any, *, scale: float = 1.0) -> Any:
            q, k, v = self.project(self.norm(tokens)).chunk(3, -1)
            weights = opsmith.ops.exp((q @ k.mT) * scale)
            return {"mixed": (weights / weights.sum(-1, keepdim=True)) @ v, "weights": weights}

    torch.manual_seed(0)
    model, tokens = Attention().eval(), torch.randn(2, 5, 8)
    made = export(model, tokens, kwargs={"scale": 0.5}, dynamic={"tokens": {0: "batch", 1: "sequence"}})
    assert made.export.outputs == ("mixed", "weights")
    assert made.shapes() == {
        "tokens": ["batch", "sequence", 8],
        "mixed": ["batch", "sequence", 8],
        "weights": ["batch", "sequence", "sequence"],
    }
    other = torch.randn(3, 9, 8)
    assert off(made.in_runtime(other), model(other, scale=0.5).values()) <= 1e-5


@pytest.mark.slow
def test_a_model_in_training_mode_is_exported_as_it_evaluates(export: Exported) -> None:
    model = torch.nn.Sequential(opsmith.ops.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout())
    model[1].eval()
    with pytest.warns(
        UserWarning, match="the model is in training mode, and is exported as it is in evaluation"
    ):
        made = export(model, X)
    assert [part.training for part in model.modules()] == [True, True, False, True]
    assert off(made.in_runtime(X), model.eval()(X)) <= 1e-6


@pytest.mark.slow
def test_an_axis_of_size_1_stays_open(export: Exported) -> None:
    made = export(opsmith.ops.exp, torch.ones(1, 3), dynamic={"x": {0: "n"}})
    assert made.shapes() == {"x": ["n", 3], "result": ["n", 3]}
    assert [dict(each.sizes) for each in made.export.comparisons] == [{"n": 1}, {"n": 2}, {"n": 3}]


@pytest.mark.slow
def test_what_the_file_says_of_itself(export: Exported) -> None:
    made = export(opsmith.ops.exp, X)
    properties = {each.key: each.value for each in made.model.metadata_props}
    assert properties["opsmith.version"] == opsmith.__version__
    assert properties["opsmith.body"] == "function"
    assert '"opsmith::exp": "' in properties["opsmith.operators"]
    assert __file__ not in str(made.model)
    assert str(made.path.parent) not in str(made.model)


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, 23])
def test_opsets(export: Exported, opset: int) -> None:
    made = export(of.affine, (X, W, B), opset=opset)
    assert {each.domain: each.version for each in made.model.opset_import} == {"": opset, "nodes": 1}
    assert off(made.in_runtime(X, W, B), of.affine(X, W, B)) <= 1e-6
