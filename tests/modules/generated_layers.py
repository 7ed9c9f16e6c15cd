"""Operators with parameters of many kinds, and the classes generated from them, at the top of a module."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

import opsmith


@opsmith.operator("layers::affine", shapes="x: ... M, weight: N M, bias: N -> ... N", batching="...")
def affine(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute y = x Wᵀ + b."""
    y = x @ weight.mT
    return y if bias is None else y + bias


affine.gradients(
    x=lambda grad, weight: grad @ weight,
    weight=lambda grad, x: torch.tensordot(grad, x, [list(range(x.ndim - 1))] * 2),
    bias=lambda grad: grad,
)
Affine = affine.module(
    sizes=("in_features", "out_features"),
    parameters={"weight": ("out_features", "in_features"), "bias": ("out_features",)},
    init={"weight": opsmith.init.uniform(-0.1, 0.1), "bias": opsmith.init.uniform(-0.1, 0.1)},
)
FromLetters = affine.module(
    sizes={"M": "in_features", "N": "out_features"},
    parameters=("weight", "bias"),
    init=opsmith.init.normal(std=0.02),
    name="FromLetters",
)


@opsmith.operator("layers::convolution")
def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int = 1,
    padding: int = 0,
    groups: int = 1,
    *,
    mode: str = "zeros",
) -> Tensor:
    """Convolve in one dimension."""
    if mode != "zeros":
        x, padding = nn.functional.pad(x, (padding, padding), mode), 0
    return nn.functional.conv1d(x, weight, bias, stride, padding, groups=groups)


Convolution = convolution.module(
    sizes=("in_channels", "out_channels", "width"),
    parameters={"weight": ("out_channels", "in_channels // groups", "width"), "bias": ("out_channels",)},
    init={"weight": opsmith.init.kaiming_uniform(a=5**0.5), "bias": opsmith.init.zeros},
)


@opsmith.operator("layers::normalise")
def normalise(
    x: Tensor, mean: Tensor, var: Tensor, gain: Tensor, shift: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalise the last dimension by statistics that are given."""
    y = (x - mean) / (var + eps).sqrt() * gain
    return y if shift is None else y + shift


Normalise = normalise.module(
    sizes=("features",),
    parameters={"gain": (), "shift": ("features",)},
    buffers={"mean": ("features",), "var": ("features",)},
    init={
        "mean": torch.nn.init.zeros_,
        "var": opsmith.init.ones,
        "gain": opsmith.init.ones,
        "shift": functools.partial(torch.nn.init.constant_, val=0.25),
    },
    non_persistent=("var",),
)


@opsmith.operator("layers::scaled_noise", random=True)
def scaled_noise(
    x: Tensor,
    scale: float,
    *,
    weight: Tensor,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Add noise times a weight."""
    noise = torch.empty_like(x).normal_(generator=generator) * weight * scale
    return x + (noise if mask is None else noise * mask)


ScaledNoise = scaled_noise.module(
    sizes=("features",), parameters={"weight": ("features",)}, init=opsmith.init.ones, forward=("scale",)
)


@opsmith.operator("layers::swish", batching="elementwise")
def swish(x: Tensor) -> Tensor:
    """Compute x sigmoid(x)."""
    return x * x.sigmoid()


Swish = swish.module()


class Doubled(Affine):  # type: ignore[misc, valid-type]  # made when the program runs
    """A subclass: twice the result, and another beginning."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Generated modules of every kind in one network, from [B, 3] to [B, 2]."""
    torch.manual_seed(3)
    return nn.Sequential(
        Affine(3, 4, dtype=dtype),
        Swish(),
        Normalise(4, dtype=dtype),
        nn.Unflatten(1, (2, 2)),
        Convolution(2, 4, 2, groups=2, bias=False, dtype=dtype),
        nn.Flatten(),
        Doubled(4, 4, dtype=dtype),
        FromLetters(4, 2, dtype=dtype),
    )
