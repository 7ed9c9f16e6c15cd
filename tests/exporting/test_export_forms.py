"""Every form of operator: optional tensors, lists, several results, attributes, types, nested operators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx_operators as of
import pytest
import torch
from onnx_files import Made, attributes, exported, off
from torch import Tensor

import opsmith
from opsmith.core.tensors import named_tensors
from opsmith.exporting.model import item_name

Exported = Callable[..., Made]
torch.manual_seed(0)
X, W, B = torch.randn(4, 6), torch.randn(3, 6), torch.randn(3)
DESCRIBED: dict[str, Any] = {
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
LAYERS = torch.nn.Sequential(*(opsmith.ops.Linear(6, 6) for _ in range(3)), opsmith.ops.Linear(6, 2)).eval()


def _optional(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    both = of.affine(x, w, b, b) + of.affine(x, w)
    return both + of.affine(x, w, b) + of.affine(x, w, None, b) + of.affine(x, w, b)


def _list_among_results(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    one, two, rest = of.mixed_results(x, 3)
    (empty, _, none), (_, _, skipped) = of.mixed_results(x, 0), of.mixed_results(x * 2)
    assert none == []
    return [one, two, *rest, empty, skipped[1]]


def _narrow(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return of.affine(x.half(), w.half(), b.half())


def _wide(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return of.affine(x.double(), w.double(), b.double())


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "optional_tensors": _optional,
    "equal_layers": lambda x, w, b: LAYERS(x),
    "two_attributes": lambda x, w, b: of.moments(x)[0] + of.moments(x, 3.0)[0],
    "several_results": lambda x, w, b: of.moments(x, 2.5),
    "hidden_results": lambda x, w, b: of.normalised(x + 1),
    "results_not_always_there": lambda x, w, b: (of.maybe(x)[0], *of.maybe(x, True)),
    "list_of_tensors": lambda x, w, b: of.weighted([x, x + 1, 2 * x], [1.0, -2.0, 0.5]),
    "list_of_results": lambda x, w, b: [part - 1 for part in of.halves(x, 3)][1:],
    "first_of_a_list": lambda x, w, b: of.halves(x - 1, 3)[0] * 3,
    "sizes_of_a_list": lambda x, w, b: sum(part.sum() for part in of.halves(x + 2, 3)),
    "list_among_results": _list_among_results,
    "list_that_nobody_asks_for": lambda x, w, b: of.mixed_results(x * 3, 3)[0],
    "every_attribute": lambda x, w, b: of.described(x, **DESCRIBED),
    "default_attributes": lambda x, w, b: of.described(x),
    "operators_within": lambda x, w, b: of.outer(x),
    "size_of_an_axis": lambda x, w, b: of.widened(x, x.shape[0] + 1),
    "sizes_of_an_axis": lambda x, w, b: (
        of.framed(x, (2 * x.shape[0], 8)) + of.framed(x, (2 * x.shape[0], 8), 1.5)
    ),
    "number_of_an_axis": lambda x, w, b: of.scaled_by(x, x.shape[0]),
    "constants": lambda x, w, b: of.constant(x[:, :3]),
    "float16": _narrow,
    "float64": _wide,
    "numbers_in_float64": lambda x, w, b: of.scaled_by_float(x.double(), 0.3) + 0.7,
}


class AllForms(torch.nn.Module):
    """Every form, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = LAYERS

    def forward(self, x: Tensor, w: Tensor, b: Tensor) -> dict[str, Any]:
        return {name: function(x, w, b) for name, function in FORMS.items()}


def _all_forms(folder: Path, body: str) -> Made:
    return exported(folder, AllForms().eval(), (X, W, B), body=body, dynamic={"x": {0: "n"}})


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """All forms in one file, as nodes with functions."""
    return _all_forms(tmp_path_factory.mktemp("onnx"), "function")


@pytest.fixture(scope="module")
def in_place(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """All forms in one file, inlined."""
    return _all_forms(tmp_path_factory.mktemp("onnx"), "inline")


TOLERANCES = {"float16": 2e-2, "float64": 1e-14, "numbers_in_float64": 1e-14}


@pytest.fixture(scope="module")
def compared(forms: Made) -> dict[str, tuple[Any, ...]]:
    """Of each output, PyTorch's, ONNX Runtime's and ONNX's evaluator's, at another size."""
    x = torch.randn(7, 6)
    want = dict(named_tensors(AllForms().eval()(x, W, B), "", item_name))
    got, evaluated = forms.named(forms.in_runtime(x, W, B)), forms.named(forms.in_evaluator(x, W, B))
    return {name: (want[name], got[name], evaluated[name]) for name in want}


@pytest.mark.every(8)
@pytest.mark.parametrize("form", FORMS)
def test_results_at_another_size(compared: dict[str, tuple[Any, ...]], form: str) -> None:
    names = [name for name in compared if name == form or name.rpartition("_")[0] == form]
    assert len(names) == len(list(named_tensors(FORMS[form](X, W, B))))
    for name in names:
        want, *others = compared[name]
        for got in others:
            assert off([got], want) <= TOLERANCES.get(form, 1e-6)


def test_all_forms_were_compared(forms: Made) -> None:
    assert {each.output for each in forms.export.comparisons} == set(forms.export.outputs)
    assert {each.sizes["n"] for each in forms.export.comparisons} == {4, 5, 8}
    onnx.checker.check_model(forms.model, full_check=True)


class InlinedForms(torch.nn.Module):
    """A form of each kind of input and result."""

    def forward(self, x: Tensor, w: Tensor, b: Tensor) -> dict[str, Any]:
        return {
            name: FORMS[name](x, w, b)
            for name in ("optional_tensors", "list_among_results", "operators_within")
        }


@pytest.mark.slow
def test_some_forms_inlined(export: Exported) -> None:
    made = export(InlinedForms().eval(), (X, W, B), body="inline", dynamic={"x": {0: "n"}}, verify=False)
    assert not made.ours()
    assert not made.model.functions
    assert {each.domain for each in made.model.opset_import} == {""}
    x = torch.randn(7, 6)
    want = dict(named_tensors(InlinedForms().eval()(x, W, B), "", item_name))
    got = made.named(made.in_runtime(x, W, B))
    assert all(off([got[name]], want[name]) <= 1e-6 for name in want)


@pytest.mark.slow
def test_inlined_forms(in_place: Made, forms: Made) -> None:
    assert not in_place.ours()
    assert not in_place.model.functions
    assert {each.domain for each in in_place.model.opset_import} == {""}
    assert (in_place.export.nodes, in_place.export.calls) == ({}, forms.export.nodes)
    x = torch.randn(7, 6)
    want = dict(named_tensors(AllForms().eval()(x, W, B), "", item_name))
    got = in_place.named(in_place.in_runtime(x, W, B))
    for name in want:
        tolerance = next((TOLERANCES[form] for form in TOLERANCES if name.startswith(form)), 1e-6)
        assert off([got[name]], want[name]) <= tolerance
    onnx.checker.check_model(in_place.model, full_check=True)


def test_optional_tensors_present_and_absent_have_bodies_of_their_own(forms: Made) -> None:
    nodes = forms.of("nodes::affine")
    assert [list(node.input) for node in nodes[:4]] == [
        ["x", "w", "b", "b"],
        ["x", "w"],
        ["x", "w", "b"],
        ["x", "w", "", "b"],
    ]
    assert [node.op_type for node in nodes[:4]] == ["affine", "affine_2", "affine_3", "affine_4"]
    assert {node.overload for node in forms.ours()} == {""}


def test_equal_bodies_are_shared(forms: Made) -> None:
    assert forms.export.nodes["opsmith::linear"] == 4
    assert [each.name for each in forms.model.functions if each.domain == "opsmith"].count("linear") == 1
    # A function says nothing of types: that of float32 serves float16 and float64.
    assert [node.op_type for node in forms.of("nodes::affine")[4:]] == ["affine_3", "affine_3"]
    assert forms.export.nodes["nodes::affine"] == 6


def test_calls_that_differ_in_attributes_alone_stay_apart(forms: Made) -> None:
    nodes = forms.of("nodes::moments")
    assert [attributes(node)["scale"] for node in nodes] == [1.0, 3.0, 2.5]
    assert [node.op_type for node in nodes] == ["moments", "moments_2", "moments_3"]


def test_several_results_and_hidden_ones(forms: Made) -> None:
    assert [len(node.output) for node in forms.of("nodes::moments")] == [2, 2, 2]
    assert [len(node.output) for node in forms.of("nodes::normalised")] == [1]


@pytest.mark.slow
def test_an_operator_alone_names_its_results(export: Exported) -> None:
    assert export(of.moments, (X, 2.5), body="node").export.outputs == ("mean", "spread")
    assert export(of.halves, X, body="node").export.outputs == ("result_0", "result_1")


def test_results_that_are_not_always_there(forms: Made) -> None:
    assert [len(node.output) for node in forms.of("nodes::maybe")] == [1, 2]


def test_lists_of_tensors(forms: Made) -> None:
    (node,) = forms.of("nodes::weighted")
    assert len(node.input) == 3
    assert attributes(node) == {"xs_count": 3, "weights": [1.0, -2.0, 0.5]}
    assert [len(node.output) for node in forms.of("nodes::halves")] == [3, 3, 3]
    assert [len(node.output) for node in forms.of("nodes::mixed_results")] == [5, 2, 4, 5]


def test_numbers_that_follow_from_an_axis_are_inputs(forms: Made) -> None:
    """Of those in a list, the others are in the body."""
    for name in ("widened", "scaled_by"):
        (node,) = forms.of(f"nodes::{name}")
        assert (len(node.input), attributes(node)) == (2, {})
    assert [len(node.input) for node in forms.of("nodes::framed")] == [2, 2]
    assert [attributes(node) for node in forms.of("nodes::framed")] == [{"value": 0.5}, {"value": 1.5}]
    functions = {each.name: list(each.input) for each in forms.model.functions}
    assert functions["widened"] == ["x", "size"]
    assert functions["framed"] == ["x", "size_0"]


def test_every_kind_of_attribute(forms: Made) -> None:
    given, default = map(attributes, forms.of("nodes::described"))
    assert given == {
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
    assert default["number"] == 3
    assert default["pair"] == [1, 1]
    assert "steps" not in default


def test_operators_within_a_reference_are_nodes_within_its_function(forms: Made) -> None:
    inner = next(each for each in forms.model.functions if each.name == "outer")
    assert [(node.domain, node.op_type) for node in inner.node if node.domain] == [
        ("opsmith", "exp"),
        ("nodes", "moments"),
    ]


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
        UserWarning, match="the model is in training mode, but it is exported in evaluation mode"
    ):
        made = export(model, X)
    assert [part.training for part in model.modules()] == [True, True, False, True]
    assert off(made.in_runtime(X), model.eval()(X)) <= 1e-6


@pytest.mark.slow
def test_an_axis_of_size_1_stays_open(export: Exported) -> None:
    made = export(opsmith.ops.exp, torch.ones(1, 3), dynamic={"x": {0: "n"}})
    assert made.shapes() == {"x": ["n", 3], "result": ["n", 3]}
    assert [each.sizes["n"] for each in made.export.comparisons] == [1, 1, 1, 2, 3]


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
