"""The layer around involution computes what its formula says, in every mode, and refuses other numbers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opsmith.ops import Involution2d


def expected(layer: Involution2d, x: Tensor) -> Tensor:
    """The layer, pixel by pixel: each sees its kernel alone."""
    K, s, G = layer.kernel_size, layer.stride, layer.groups
    B, C, H, W = x.shape
    kernels = layer.span(torch.relu(layer.norm(layer.reduce(layer.pool(x)))))
    padded = nn.functional.pad(x, (K // 2,) * 4)
    result = torch.empty(B, C, -(-H // s), -(-W // s), dtype=x.dtype)
    for i in range(result.shape[2]):
        for j in range(result.shape[3]):
            window = padded[:, :, i * s : i * s + K, j * s : j * s + K].reshape(B, G, C // G, K, K)
            kernel = kernels[:, :, i, j].reshape(B, G, 1, K, K)
            result[:, :, i, j] = (window * kernel).sum((3, 4)).flatten(1)
    return result


@pytest.mark.every(5)
@pytest.mark.parametrize("size", [(6, 4), (5, 7), (1, 1)], ids=str)
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel_size", [1, 3, 7])
@pytest.mark.parametrize("groups", [{"groups": 1}, {"groups": 2}, {"channels_per_group": 2}], ids=str)
def test_it_is_its_formula(size: tuple[int, int], stride: int, kernel_size: int, groups: Any) -> None:
    torch.manual_seed(0)
    layer = Involution2d(8, kernel_size, stride, **groups, reduction=2, dtype=torch.float64).eval()
    x = torch.randn(2, 8, *size, dtype=torch.float64)
    torch.testing.assert_close(layer(x), expected(layer, x))


def test_by_default_sixteen_channels_share_a_kernel() -> None:
    layer = Involution2d(64)
    assert (layer.groups, layer.kernel_size, layer.stride) == (4, 7, 1)
    assert layer.reduce.out_channels == 16
    assert layer.span.out_channels == 4 * 49


def test_every_parameter_gets_a_gradient() -> None:
    layer = Involution2d(32, 3, 2)
    layer(torch.randn(3, 32, 6, 6)).square().sum().backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in layer.parameters())


def test_a_saved_layer_is_loaded() -> None:
    one, other = Involution2d(16, 3).eval(), Involution2d(16, 3).eval()
    other.load_state_dict(one.state_dict())
    x = torch.randn(1, 16, 4, 4)
    assert torch.equal(one(x), other(x))


@pytest.mark.parametrize(
    ("given", "argument", "expected"),
    [
        ({"channels": 0}, "channels", "a whole number of at least 1"),
        ({"channels": 16, "kernel_size": 4}, "kernel_size", "an odd number, because a kernel needs a middle"),
        ({"channels": 16, "kernel_size": 3.0}, "kernel_size", "a whole number of at least 1"),
        ({"channels": 16, "stride": 0}, "stride", "a whole number of at least 1"),
        ({"channels": 16, "reduction": 3}, "reduction", "a divisor of channels=16"),
        ({"channels": 24}, "channels_per_group", "a divisor of channels=24"),
        ({"channels": 24, "groups": 5}, "groups", "a divisor of channels=24"),
        (
            {"channels": 24, "groups": 3, "channels_per_group": 8},
            "groups",
            "None if `channels_per_group` is given",
        ),
    ],
    ids=str,
)
def test_numbers_that_make_no_layer(given: dict[str, Any], argument: str, expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"expects `{argument}` to be {expected}, got ")) as raised:
        Involution2d(**given)
    assert "; choose other numbers: `Involution2d(64, " in str(raised.value)


@pytest.mark.parametrize("argument", ["channels", "groups", "channels_per_group", "stride"])
def test_a_number_in_quotes_is_shown_with_them(argument: str) -> None:
    with pytest.raises(ValueError, match=rf"expects `{argument}` to be .*, got '2'; "):
        Involution2d(**{"channels": 16, argument: "2"})


@pytest.mark.parametrize(
    "argument", ["channels", "kernel_size", "stride", "groups", "channels_per_group", "reduction"]
)
def test_true_counts_nothing(argument: str) -> None:
    with pytest.raises(ValueError, match=rf"^Involution2d expects `{argument}` to be .*, got True; "):
        Involution2d(**{"channels": 16, argument: True})


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize(
    ("dynamic", "backend"),
    [
        pytest.param(False, "inductor", id="static", marks=pytest.mark.slow),
        pytest.param(True, "aot_eager", id="dynamic"),
        pytest.param(True, "inductor", id="dynamic-inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled_gradients_are_right_where_the_stride_does_not_divide_a_side(
    dynamic: bool, backend: str
) -> None:
    torch.manual_seed(0)
    layer = Involution2d(16, 3, 2, dtype=torch.float64).eval()
    Involution2d(32, 3, 2, dtype=torch.float64)(torch.randn(3, 32, 6, 6, dtype=torch.float64))
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=dynamic)
    x = torch.randn(2, 16, 5, 6, dtype=torch.float64, requires_grad=True)
    ours = torch.autograd.grad(compiled(x).square().sum(), [x, *layer.parameters()])
    theirs = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
@pytest.mark.compile
def test_it_compiles_whole_and_is_exported() -> None:
    torch.manual_seed(0)
    layer = Involution2d(16, 3, 2)
    x = torch.randn(2, 16, 6, 6, requires_grad=True)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    ours = torch.autograd.grad(compiled(x).square().sum(), [x, *layer.parameters()])
    theirs = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    torch.testing.assert_close(ours, theirs)
    for stride, varies in ((1, {0: "batch", 2: "height"}), (2, {0: "batch"})):
        layer = Involution2d(16, 3, stride).eval()
        sizes = {"x": {at: torch.export.Dim(name, min=2) for at, name in varies.items()}}
        program = torch.export.export(layer, (x.detach(),), dynamic_shapes=sizes).module()
        other = torch.randn(3, 16, 9 if 2 in varies else 6, 6)
        torch.testing.assert_close(program(other), layer(other))
