"""The bundled operators and networks of them: three bodies, three sizes of every dynamic axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx
import pytest
import torch
from onnx_files import Made, attributes, exported, off
from torch import Tensor, nn

from opsmith import Operator, ops
from opsmith.ops.involution import involution_input_gradient, involution_weight_gradient
from opsmith.ops.rednet import RedNet, rednet
from opsmith.tour.digits import DigitNetwork, split_digits

Exported = Callable[..., Made]
LARGEST = 1e-5
"""Of float32: the project's own promise."""
BODIES = ["function", "inline", "node"]


def _size(pixels: int) -> int:
    """Pixels of the result of an involution with kernel 3, stride 2 and padding 1."""
    return (pixels + 2 - 3) // 2 + 1


def _involution(b: int, h: int, w: int) -> tuple[Tensor, Tensor]:
    return torch.randn(b, 4, h, w), torch.randn(b, 2, 3, 3, _size(h), _size(w))


def _input_gradient(b: int) -> tuple[Tensor, Tensor]:
    return torch.randn(b, 4, 4, 5), torch.randn(b, 2, 3, 3, 4, 5)


def _weight_gradient(b: int, h: int, w: int) -> tuple[Tensor, Tensor]:
    return torch.randn(b, 4, _size(h), _size(w)), torch.randn(b, 4, h, w)


Case = tuple[Any, Callable[..., tuple[Tensor, ...]], tuple[Any, ...], list[dict[int, str]]]
PAGES = torch.tensor([[2, 0], [1, 0]]), torch.tensor([3, 2])
# What makes tensors for sizes of its axes, what it is called with beside them, and where those axes are.
CASES: dict[str, Case] = {
    "exp": (ops.exp, lambda n, m: (torch.randn(n, m),), (), [{0: "n", 1: "m"}]),
    "mul": (ops.mul, lambda n: (torch.randn(n, 4), torch.randn(4)), (), [{0: "n"}, {}]),
    "add": (ops.add, lambda n: (torch.randn(n, 4), torch.randn(n, 4)), (), [{0: "n"}, {0: "n"}]),
    "linear": (
        ops.linear,
        lambda n, k: (torch.randn(n, k, 5), torch.randn(2, 5), torch.randn(2)),
        (),
        [{0: "n", 1: "k"}, {}, {}],
    ),
    "rms_norm": (ops.rms_norm, lambda n: (torch.randn(n, 5), torch.randn(5)), (), [{0: "n"}, {}]),
    "paged_attention": (
        ops.paged_attention,
        lambda h: (torch.randn(2, h, 4), torch.randn(3, 2, h, 4), torch.randn(3, 2, h, 4), *PAGES),
        (),
        [{1: "h"}, {2: "h"}, {2: "h"}, {}, {}],
    ),
    "involution": (
        ops.involution,
        _involution,
        (2, 1),
        [{0: "b", 2: "h", 3: "w"}, {0: "b", 4: "i", 5: "j"}],
    ),
    "involution_input_gradient": (
        involution_input_gradient,
        _input_gradient,
        ((7, 9), 2, 1),  # the size of its result is fixed in a node, and so are all sizes but the batch's
        [{0: "b"}, {0: "b"}],
    ),
    "involution_weight_gradient": (
        involution_weight_gradient,
        _weight_gradient,
        (2, (3, 3), 2, 1),
        [{0: "b", 2: "i", 3: "j"}, {0: "b", 2: "h", 3: "w"}],
    ),
}
SIZES = {1: [(4,), (7,), (1,)], 2: [(4, 6), (9, 2), (1, 3)], 3: [(2, 7, 9), (3, 12, 5), (1, 4, 4)]}


def _tensors(name: str, at: int) -> tuple[Tensor, ...]:
    """Tensors for an operator, at one of three sizes of each of its axes."""
    make = CASES[name][1]
    return make(*SIZES[make.__code__.co_argcount][at])


def test_no_bundled_operator_is_left_out() -> None:
    """But those that write in place, for which ONNX has no node."""
    operators = {name: each for name in ops.__all__ if isinstance(each := getattr(ops, name), Operator)}
    bundled = {name for name, each in operators.items() if not each.specification.schema.written}
    assert bundled == set(CASES) - {"involution_input_gradient", "involution_weight_gradient"}


class Everything(nn.Module):
    """Calls every bundled operator, each on tensors of its own."""

    def forward(self, tensors: dict[str, tuple[Tensor, ...]]) -> dict[str, Tensor]:
        return {name: CASES[name][0](*given, *CASES[name][2]) for name, given in tensors.items()}


def _everything(at: int) -> dict[str, tuple[Tensor, ...]]:
    return {name: _tensors(name, at) for name in CASES}


def _flat(tensors: Mapping[str, tuple[Tensor, ...]]) -> list[Tensor]:
    return [each for given in tensors.values() for each in given]


@pytest.fixture(
    scope="module",
    params=BODIES,
)
def everything(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """All bundled operators in one file."""
    dynamic = {
        f"tensors_{name}_{at}": {axis: f"{name}_{title}" for axis, title in axes.items()}
        for name, (*_, each) in CASES.items()
        for at, axes in enumerate(each)
    }
    # How some sizes follow from others is no axis that could be set alone: they are set together, below.
    return exported(
        tmp_path_factory.mktemp("onnx"),
        Everything().eval(),
        ({name: _tensors(name, 0) for name in CASES},),
        body=request.param,
        dynamic=dynamic,
        verify=False,
    )


@pytest.fixture(scope="module")
def beside(everything: Made) -> list[tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor] | None]]:
    """At three sizes: PyTorch's results, ONNX Runtime's, and those of ONNX's evaluator for functions."""
    found = []
    for at in range(3) if everything.export.body != "node" else ():
        given = _everything(at)
        want = Everything()(given)
        got = everything.named(everything.in_runtime(*_flat(given)))
        function = everything.export.body == "function"
        evaluated = everything.named(everything.in_evaluator(*_flat(given))) if function else None
        found.append((want, got, evaluated))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_operator_in_one_file_with_all_others(everything: Made, beside: Any, name: str) -> None:
    body = everything.export.body
    nodes = everything.of(f"opsmith::{name}")
    assert [(node.domain, node.op_type) for node in nodes] == (
        [] if body == "inline" else [("opsmith", name)]
    )
    functions = [each for each in everything.model.functions if each.name == name]
    assert [each.domain for each in functions] == (["opsmith"] if body == "function" else [])
    assert everything.export.calls[f"opsmith::{name}"] == 1
    assert len(beside) == (0 if body == "node" else 3)
    for want, got, evaluated in beside:
        assert off([got[name]], want[name]) <= LARGEST
        if body == "function":
            assert off([evaluated[name]], want[name]) <= LARGEST


@pytest.mark.slow
def test_one_file_with_all_operators_is_valid(everything: Made) -> None:
    onnx.checker.check_model(everything.model, full_check=True)
    shapes = everything.shapes()
    assert shapes["exp"] == ["exp_n", "exp_m"]
    assert shapes["linear"] == ["linear_n", "linear_k", 2]
    assert shapes["involution"][:2] == ["involution_b", 4]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("body", BODIES)
def test_an_operator_alone(export: Exported, name: str, body: str) -> None:
    operator, _, rest, axes = CASES[name]
    names = [each.name for each in operator.specification.schema.leaves]
    tensors = _tensors(name, 0)
    dynamic = dict(zip(names, axes, strict=False))
    verify = not name.startswith("involution")  # as above
    made = export(operator, (*tensors, *rest), body=body, dynamic=dynamic, verify=verify)
    onnx.checker.check_model(made.model, full_check=True)
    assert len(made.ours()) == (body != "inline")
    assert [(each.domain, each.name) for each in made.model.functions] == (
        [("opsmith", name)] if body == "function" else []
    )
    for at in range(3) if body != "node" else ():
        given = _tensors(name, at)
        want = operator(*given, *rest)
        assert off(made.in_runtime(*given), want) <= LARGEST
        if body == "function":
            assert off(made.in_evaluator(*given), want) <= LARGEST


@pytest.mark.slow
def test_attributes_of_involution_are_whole_numbers_on_the_node(everything: Made) -> None:
    for node in everything.of("opsmith::involution"):
        assert list(node.input) == ["tensors_involution_0", "tensors_involution_1"]
        assert attributes(node) == {"stride": [2, 2], "padding": [1, 1], "dilation": [1, 1]}
    for node in everything.of("opsmith::involution_input_gradient"):
        assert attributes(node)["size"] == [7, 9]
    expected = 0 if everything.export.body == "inline" else 1
    assert len(everything.of("opsmith::involution")) == expected
    assert len(everything.of("opsmith::involution_input_gradient")) == expected


@pytest.mark.every(8)
@pytest.mark.parametrize("body", BODIES)
def test_the_linear_model_of_the_mission(export: Exported, body: str) -> None:
    """Row C3: two inputs, one output, float64."""
    model = ops.Linear(2, 1, dtype=torch.float64).eval()
    made = export(
        model,
        torch.rand(8, 2).double(),
        body=body,
        dynamic={"x": {0: "batch"}},
        input_names=["x"],
        output_names=["y"],
    )
    onnx.checker.check_model(made.model, full_check=True)
    assert made.export.nodes == ({} if body == "inline" else {"opsmith::linear": 1})
    assert made.export.difference <= 1e-14
    assert [each.sizes["batch"] for each in made.export.comparisons] == (
        [] if body == "node" else [8, 8, 8, 9, 16]
    )
    assert made.export.verified == (body != "node")
    assert made.shapes() == {"x": ["batch", 2], "y": ["batch", 1]}
    assert {each.name for each in made.model.graph.initializer} >= {"weight", "bias"}
    for batch in (1, 8, 100) if body != "node" else ():
        x = torch.rand(batch, 2).double()
        assert off(made.in_runtime(x), model(x)) <= 1e-14


class Networks(nn.Module):
    """A layer and a small RedNet; the network of the tour is exported by a test of the tour."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = ops.Involution2d(32, 3, 2)
        self.rednet = RedNet((1, 1), classes=10, in_channels=1, width=32, small=True)

    def forward(self, x: Tensor, images: Tensor) -> dict[str, Tensor]:
        return {"layer": self.layer(x), "rednet": self.rednet(images)}


DYNAMIC = {"x": {0: "batch", 2: "h", 3: "w"}, "images": {0: "count"}}


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES)
def test_networks(export: Exported, body: str) -> None:
    torch.manual_seed(0)
    model = Networks().eval()
    x, images = torch.randn(2, 32, 9, 12), torch.rand(4, 1, 8, 8)
    made = export(model, (x, images), body=body, dynamic=DYNAMIC)
    assert made.export.calls["opsmith::involution"] == 1 + 3
    assert made.export.difference <= LARGEST
    assert not made.export.left_out
    for title, sizes in {"batch": {2, 3, 4}, "h": {9, 10, 18}, "w": {12, 13, 24}, "count": {4, 5, 8}}.items():
        compared = {each.sizes[title] for each in made.export.comparisons}
        assert compared == (set() if body == "node" else sizes)
    onnx.checker.check_model(made.model, full_check=True)
    for batch, h, w, count in [(1, 5, 7, 1), (3, 8, 30, 9)] if body != "node" else ():
        given = torch.randn(batch, 32, h, w), torch.rand(count, 1, 8, 8)
        got, want = made.named(made.in_runtime(*given)), model(*given)
        for name in want:
            assert off([got[name]], want[name]) <= LARGEST
        assert torch.equal(got["rednet"].argmax(1), want["rednet"].argmax(1))


@pytest.mark.parametrize("body", [pytest.param(each, marks=pytest.mark.slow) for each in BODIES])
def test_the_digits_network_alone(export: Exported, body: str) -> None:
    torch.manual_seed(0)
    model, images = DigitNetwork().eval(), split_digits(0)[1].pixels
    made = export(model, images[:4], body=body, dynamic={"images": {0: "batch"}})
    assert made.export.difference <= LARGEST
    assert len({each.sizes["batch"] for each in made.export.comparisons}) == (0 if body == "node" else 3)
    onnx.checker.check_model(made.model, full_check=True)
    assert made.export.calls["opsmith::involution"] == 3
    if body != "node":
        (logits,) = made.in_runtime(images)
        assert len(images) > 100
        assert off([logits], model(images)) <= LARGEST
        assert torch.equal(logits.argmax(1), model(images).argmax(1))


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES)
def test_rednet_26_reads_every_image_as_pytorch_does(export: Exported, body: str) -> None:
    torch.manual_seed(0)
    model, images = rednet(26, classes=10).eval(), torch.randn(64, 3, 64, 64)
    made = export(model, images[:2], body=body, dynamic={"images": {0: "batch"}})
    assert made.export.calls == {"opsmith::involution": 9}
    assert made.export.difference <= LARGEST
    assert [each.sizes["batch"] for each in made.export.comparisons] == (
        [] if body == "node" else [2, 2, 2, 3, 4]
    )
    onnx.checker.check_model(made.model, full_check=True)
    layers = [part for part in model.modules() if isinstance(part, ops.Involution2d)]
    said = [attributes(node) for node in made.of("opsmith::involution")]
    if body == "inline":
        assert not made.ours()
    else:
        assert len(made.ours()) == len(said) == len(layers) == 9
        assert [each["stride"] for each in said] == [[layer.stride] * 2 for layer in layers]
        assert [each["padding"] for each in said] == [[layer.kernel_size // 2] * 2 for layer in layers]
        assert [each["dilation"] for each in said] == [[1, 1]] * 9
    if body != "node":
        (logits,) = made.in_runtime(images)
        assert torch.equal(logits.argmax(1), model(images).argmax(1))
        assert off([logits], model(images)) <= LARGEST
