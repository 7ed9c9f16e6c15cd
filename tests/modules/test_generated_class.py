"""The generated class: its names, signature, docstring, constructor, repr, and what each module owns."""

from __future__ import annotations

import inspect
import traceback
from typing import Any

import pytest
import torch
from generated_layers import (
    Affine,
    Convolution,
    Doubled,
    FromLetters,
    Normalise,
    ScaledNoise,
    Swish,
    affine,
    swish,
)
from torch import Tensor, nn
from torch.testing import assert_close

import opsmith
from opsmith import errors
from opsmith.modules import OperatorModule
from opsmith.modules.declaration import read_dimension


class Outer:
    Inner = swish.module(name="Inner")


def test_names() -> None:
    assert (Affine.__name__, Affine.__qualname__, Affine.__module__) == (
        "Affine",
        "Affine",
        "generated_layers",
    )
    assert ScaledNoise.__name__ == "ScaledNoise"
    assert Outer.Inner.__qualname__ == "Outer.Inner"
    local = swish.module()
    assert local.__qualname__ == "test_names.<locals>.Swish"
    assert local.__module__ == __name__
    assert issubclass(Affine, OperatorModule)
    assert issubclass(Affine, nn.Module)
    assert Affine.forward.__qualname__ == "Affine.forward"
    assert Affine.operator is affine


SIGNATURES = {
    Affine: "(in_features: int | None, out_features: int, bias: bool = True, *, DEVICE) -> None",
    Convolution: "(in_channels: int, out_channels: int, width: int, stride: int = 1, padding: int = 0, "
    "groups: int = 1, bias: bool = True, *, mode: str = 'zeros', DEVICE) -> None",
    Normalise: "(features: int, eps: float = 1e-05, shift: bool = True, *, DEVICE) -> None",
    ScaledNoise: "(features: int, *, DEVICE) -> None",
    Swish: "(*, DEVICE) -> None",
}
FORWARDS = {
    Affine: "(x: Tensor) -> Tensor",
    Convolution: "(x: Tensor) -> Tensor",
    Normalise: "(x: Tensor) -> Tensor",
    ScaledNoise: "(x: Tensor, scale: float, *, mask: Tensor | None = None, "
    "generator: torch._C.Generator | None = None) -> Tensor",
    Swish: "(x: Tensor) -> Tensor",
}


@pytest.mark.parametrize("kind", SIGNATURES, ids=lambda kind: kind.__name__)
def test_signatures(kind: Any) -> None:
    device = "device: torch.device | str | int | None = None, dtype: torch.dtype | None = None"
    assert str(inspect.signature(kind)) == SIGNATURES[kind].replace("DEVICE", device)
    assert str(inspect.signature(kind.__init__)).startswith("(self, ")
    forward = str(inspect.signature(kind.forward)).replace("torch.Tensor", "Tensor")
    assert forward == FORWARDS[kind].replace("(", "(self, ", 1)


def test_annotations() -> None:
    assert inspect.get_annotations(Affine) == {
        "in_features": int,
        "out_features": int,
        "weight": nn.Parameter,
        "bias": nn.Parameter | None,
    }
    found = inspect.get_annotations(Normalise)
    assert (found["mean"], found["gain"], found["eps"]) == (Tensor, nn.Parameter, float)


def test_docstring() -> None:
    assert inspect.getdoc(Normalise) == inspect.cleandoc(
        """
        Normalise the last dimension by statistics that are given.

        A module around the operator `layers::normalise`.

        Args:
            features: A size.
            eps: Argument of the operator; 1e-05 by default.
            shift: True for a module with a `shift`.
            device, dtype: Device and dtype of parameters and buffers.

        Attributes:
            gain: parameter [], which begins as `ones`.
            shift: parameter [features], which begins as `constant_(val=0.25)`.
            mean: buffer [features], which begins as `zeros_`.
            var: buffer [features], which begins as `ones`.
        """
    )
    assert inspect.getdoc(Swish) == "Compute x sigmoid(x).\n\nA module around the operator `layers::swish`."


REPRS = {
    "Affine(in_features=2, out_features=1, bias=True)": lambda: Affine(2, 1),
    "Affine(in_features=2, out_features=1, bias=False)": lambda: Affine(2, 1, False),
    "FromLetters(in_features=3, out_features=2, bias=True)": lambda: FromLetters(
        out_features=2, in_features=3
    ),
    "Convolution(in_channels=4, out_channels=2, width=3, stride=2, mode='circular', bias=True)": (
        lambda: Convolution(4, 2, 3, 2, mode="circular")
    ),
    "Normalise(features=3, shift=True)": lambda: Normalise(3),
    "Doubled(in_features=2, out_features=1, bias=True)": lambda: Doubled(2, 1),
    "Swish()": lambda: Swish(),
}


@pytest.mark.parametrize("text", REPRS)
def test_repr(text: str) -> None:
    assert repr(REPRS[text]()) == text


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_dtype_and_device(dtype: torch.dtype) -> None:
    layer = Affine(2, 1, dtype=dtype, device="meta")
    assert {(each.dtype, each.device.type) for each in layer.parameters()} == {(dtype, "meta")}
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert all(0 < each.abs().max() <= 0.15 for each in layer.parameters())
    assert Affine(2, 1).weight.dtype is torch.get_default_dtype()


def test_under_a_default_device_and_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            layer = Affine(2, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (layer.weight.device.type, layer.weight.dtype) == ("meta", torch.float64)


def test_an_optional_parameter_that_is_not_there() -> None:
    layer = Affine(3, 2, bias=False)
    assert layer.bias is None
    assert list(layer.state_dict()) == ["weight"]
    assert dict(layer.named_parameters()).keys() == {"weight"}
    assert "bias" in vars(layer)["_parameters"]
    x = torch.randn(4, 3)
    assert_close(layer(x), x @ layer.weight.mT)


def test_shapes_by_arithmetic_and_by_letters() -> None:
    assert Convolution(6, 4, 3, groups=2).weight.shape == (4, 3, 3)
    assert FromLetters(3, 2).weight.shape == (2, 3)
    assert Normalise(5).gain.shape == ()
    assert Affine(0, 2).weight.shape == (2, 0)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 * hidden", 14),
        ("(hidden + 1) // 2", 4),
        ("hidden - 3", 4),
        ("hidden % 4", 3),
        (3, 3),
        (" hidden ", 7),
    ],
)
def test_dimensions(text: Any, value: int) -> None:
    read = read_dimension(text)
    assert read is not None
    assert read.value({"hidden": 7}) == value


@pytest.mark.parametrize(
    "text",
    [
        "hidden / 2",
        "f(hidden)",
        "hidden.real",
        "hidden[0]",
        "-hidden",
        "1.5",
        "hidden if 1 else 2",
        "",
        "a b",
        "'a'",
        "hidden ** 9",
        "lambda: 0",
        "a\0",
        True,
        None,
        1.0,
        [1],
    ],
)
def test_what_is_no_dimension(text: Any) -> None:
    assert read_dimension(text) is None


def test_values_against_torch() -> None:
    torch.manual_seed(0)
    mine = Convolution(4, 6, 3, stride=2, padding=1, groups=2, dtype=torch.float64)
    theirs = nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2, dtype=torch.float64)
    theirs.load_state_dict(mine.state_dict())
    x = torch.randn(2, 4, 7, dtype=torch.float64)
    assert_close(mine(x), theirs(x))
    mine.stride = theirs.stride = (1,)
    with pytest.raises(errors.ArgumentError, match="`stride` has the wrong type"):
        mine(x)
    mine.stride = 1
    assert_close(mine(x), theirs(x))


def test_buffers() -> None:
    layer = Normalise(3)
    assert [name for name, _ in layer.named_buffers()] == ["mean", "var"]
    assert list(layer.state_dict()) == ["gain", "shift", "mean"]
    assert not layer.mean.requires_grad
    layer.mean.fill_(5.0)
    assert_close(layer(torch.full((2, 3), 5.0)), torch.full((2, 3), 0.25))
    layer.reset_parameters()
    assert_close(layer.mean, torch.zeros(3))


def test_arguments_of_forward() -> None:
    layer = ScaledNoise(3)
    x = torch.zeros(2, 3)

    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(0)

    once = layer(x, 2.0, generator=generator())
    assert_close(layer(x, scale=1.0, generator=generator()), once / 2)
    assert_close(layer(x, 2.0, mask=torch.zeros(3), generator=generator()), x)
    with pytest.raises(
        TypeError, match=r"ScaledNoise.forward\(\) missing 1 required positional argument: 'scale'"
    ):
        layer(x)
    with pytest.raises(TypeError, match=r"Affine.__init__\(\) missing 1 required .*: 'out_features'"):
        Affine(2)


def test_reset_parameters_draws_again() -> None:
    torch.manual_seed(0)
    layer = Affine(3, 2)
    first = layer.weight.detach().clone()
    layer.reset_parameters()
    assert not first.equal(layer.weight)
    torch.manual_seed(0)
    layer.reset_parameters()
    assert first.equal(layer.weight)
    assert layer.weight.requires_grad
    assert layer.weight.is_leaf


def test_a_subclass() -> None:
    layer = Doubled(3, 2, dtype=torch.float64)
    x = torch.randn(4, 3, dtype=torch.float64)
    assert_close(layer(x), 2 * (x * 0.5).sum(1, keepdim=True).expand(4, 2))


def test_an_operator_that_is_declared_again() -> None:
    def declare(factor: float) -> Any:
        @opsmith.operator("layers::again")
        def again(x: Tensor, weight: Tensor) -> Tensor:
            return x * weight * factor

        return again

    Again = declare(2.0).module(sizes=("n",), parameters={"weight": ("n",)}, init=opsmith.init.ones)
    layer = Again(2)
    assert layer(torch.ones(2)).tolist() == [2.0, 2.0]
    declare(3.0)
    assert layer(torch.ones(2)).tolist() == [3.0, 3.0]


def test_a_traceback_shows_the_generated_line() -> None:
    with pytest.raises(errors.ShapeError) as caught:
        Affine(3, 2)(torch.ones(4))
    text = "".join(traceback.format_exception(caught.value))
    assert 'File "<generated_layers.Affine>"' in text
    assert "return self.operator(x, self.weight, self.bias)" in text


def test_an_initialiser_is_a_value() -> None:
    assert opsmith.init.uniform(-0.1, 0.1) == opsmith.init.uniform(-0.1, 0.1)
    assert len({opsmith.init.zeros, opsmith.init.ones, opsmith.init.Initializer("zeros")}) == 2
    with pytest.raises(AttributeError):
        opsmith.init.zeros.function = "ones"  # type: ignore[misc]


@pytest.mark.parametrize("name", sorted(set(opsmith.init.__all__) - {"Initializer"}))
def test_an_initialiser_fills_as_torch_does(name: str) -> None:
    given: Any = getattr(opsmith.init, name)
    fill = (
        given
        if isinstance(given, opsmith.init.Initializer)
        else given(0.5)
        if name == "constant"
        else given()
    )
    theirs = getattr(nn.init, f"{name}_")
    torch.manual_seed(0)
    mine = fill(torch.empty(4, 3))
    torch.manual_seed(0)
    assert_close(mine, theirs(torch.empty(4, 3), *((0.5,) if name == "constant" else ())))
