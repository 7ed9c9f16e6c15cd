"""The bundled operators and networks of them: three bodies, three sizes of every dynamic axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import pytest
import torch
from onnx_files import Made, attributes, off
from torch import Tensor

from opsmith import ops
from opsmith.ops.rednet import RedNet, rednet
from opsmith.tour.network import DigitNetwork

Exported = Callable[..., Made]
LARGEST = 1e-5
"""Of float32: the project's own promise."""


def _involution(batch: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    output = ((height + 2 - 3) // 2 + 1, (width + 2 - 3) // 2 + 1)
    return torch.randn(batch, 4, height, width), torch.randn(batch, 2, 3, 3, *output)


CASES: dict[str, tuple[Any, Callable[..., tuple[Any, ...]], dict[str, dict[int, str]]]] = {
    "exp": (ops.exp, lambda n, m: (torch.randn(n, m),), {"x": {0: "n", 1: "m"}}),
    "mul": (ops.mul, lambda n: (torch.randn(n, 4), torch.randn(4)), {"x": {0: "n"}}),
    "add": (ops.add, lambda n: (torch.randn(n, 4), torch.randn(n, 4)), {"x": {0: "n"}, "y": {0: "n"}}),
    "linear": (
        ops.linear,
        lambda n, k: (torch.randn(n, k, 5), torch.randn(2, 5), torch.randn(2)),
        {"x": {0: "n", 1: "k"}},
    ),
    "involution": (
        ops.involution,
        lambda b, h, w: (*_involution(b, h, w), 2, 1),
        {"input": {0: "b", 2: "h", 3: "w"}, "weight": {0: "b", 4: "i", 5: "j"}},
    ),
}
SIZES = {1: [(4,), (7,), (1,)], 2: [(4, 6), (9, 2), (1, 3)], 3: [(2, 7, 9), (3, 12, 5), (1, 4, 4)]}


def _axes(name: str) -> int:
    return CASES[name][1].__code__.co_argcount


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("body", ["function", "inline"])
def test_stock_runtime_computes_an_operator_at_three_sizes(export: Exported, name: str, body: str) -> None:
    operator, make, dynamic = CASES[name]
    # How the sizes of `weight` follow from those of `input` is no axis that could be set alone.
    verify = name != "involution"
    made = export(operator, make(*SIZES[_axes(name)][0]), body=body, dynamic=dynamic, verify=verify)
    for sizes in SIZES[_axes(name)]:
        args = make(*sizes)
        tensors = [each for each in args if isinstance(each, Tensor)]
        want = operator(*args)
        assert off(made.in_runtime(*tensors), want) <= LARGEST
        if body == "function":
            assert off(made.in_evaluator(*tensors), want) <= LARGEST
    assert len(made.ours()) == (body == "function")
    assert [(each.domain, each.name) for each in made.model.functions] == (
        [("opsmith", name)] if body == "function" else []
    )
    onnx.checker.check_model(made.model, full_check=True)


def test_attributes_of_involution_are_whole_numbers_on_the_node(export: Exported) -> None:
    made = export(ops.involution, (*_involution(2, 7, 9), 2, 1), body="node")
    (node,) = made.ours()
    assert (node.domain, node.op_type, list(node.input)) == ("opsmith", "involution", ["input", "weight"])
    assert attributes(node) == {"stride": [2, 2], "padding": [1, 1], "dilation": [1, 1]}
    assert not made.model.functions


@pytest.mark.parametrize("body", ["function", pytest.param("inline", marks=pytest.mark.slow)])
def test_the_linear_model_of_the_mission(export: Exported, body: str) -> None:
    model = ops.Linear(2, 1, dtype=torch.float64).eval()
    made = export(
        model,
        torch.rand(8, 2).double(),
        body=body,
        dynamic={"x": {0: "batch"}},
        input_names=["x"],
        output_names=["y"],
    )
    assert made.shapes() == {"x": ["batch", 2], "y": ["batch", 1]}
    for batch in (1, 8, 100):
        x = torch.rand(batch, 2).double()
        assert off(made.in_runtime(x), model(x)) <= 1e-14
    assert {each.name for each in made.model.graph.initializer} >= {"weight", "bias"}


def _layer() -> tuple[Any, Tensor, dict[str, dict[int, str]]]:
    return ops.Involution2d(32, 3, 2), torch.randn(2, 32, 9, 12), {"x": {0: "batch", 2: "h", 3: "w"}}


def _digits() -> tuple[Any, Tensor, dict[str, dict[int, str]]]:
    return DigitNetwork(), torch.rand(4, 1, 8, 8), {"images": {0: "batch"}}


def _small_rednet() -> tuple[Any, Tensor, dict[str, dict[int, str]]]:
    network = RedNet((1, 1), classes=10, in_channels=1, width=32, small=True)
    return network, torch.randn(2, 1, 8, 8), {"images": {0: "batch"}}


@pytest.mark.parametrize(
    ("network", "body"),
    [
        pytest.param(_layer, "function", id="layer-function", marks=pytest.mark.slow),
        pytest.param(_layer, "inline", id="layer-inline", marks=pytest.mark.slow),
        pytest.param(_digits, "function", id="digits-function"),
        pytest.param(_digits, "inline", id="digits-inline", marks=pytest.mark.slow),
        pytest.param(_small_rednet, "function", id="rednet-function", marks=pytest.mark.slow),
        pytest.param(_small_rednet, "inline", id="rednet-inline", marks=pytest.mark.slow),
    ],
)
def test_networks(export: Exported, network: Callable[..., Any], body: str) -> None:
    torch.manual_seed(0)
    model, x, dynamic = network()
    made = export(model.eval(), x, body=body, dynamic=dynamic)
    assert made.export.difference <= LARGEST
    sizes = {tuple(each.sizes.items()) for each in made.export.comparisons}
    assert len(sizes) == 1 + 2 * len(next(iter(dynamic.values())))
    larger = torch.cat([x, x])[:3]
    assert off(made.in_runtime(larger), model(larger)) <= LARGEST


@pytest.mark.slow
@pytest.mark.parametrize("body", ["function", "inline", "node"])
def test_rednet_26_reads_every_image_as_pytorch_does(export: Exported, body: str) -> None:
    torch.manual_seed(0)
    model, images = rednet(26, classes=10).eval(), torch.randn(16, 3, 64, 64)
    made = export(model, images[:2], body=body, dynamic={"images": {0: "batch"}})
    assert made.export.nodes == {"opsmith::involution": 9}
    assert made.export.difference <= LARGEST
    if body != "inline":
        assert len(made.ours()) == 9
        for node in made.ours():
            assert set(attributes(node)) == {"stride", "padding", "dilation"}
    if body != "node":
        (logits,) = made.in_runtime(images)
        assert torch.equal(logits.argmax(1), model(images).argmax(1))
