"""Linear layer: the affine map y = x Wᵀ + b."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import opsmith


@opsmith.operator(
    "opsmith::linear",
    shapes="x: ... M, weight: N M, bias: N -> ... N",
    batching="...",
    autocast="lower",
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute y = x Wᵀ + b.

    Args:
        x: [..., M], floating or complex, with any number of leading dimensions, or none.
        weight: [N, M].
        bias: [N], or None.

    Returns:
        [..., N].

    Raises:
        ShapeError: If the shapes do not fit.

    Example:
        >>> import torch
        >>> x, weight, bias = torch.tensor([[4.0, 5.0]]), torch.tensor([[2.0, 3.0]]), torch.tensor([3.0])
        >>> linear(x, weight, bias)
        tensor([[26.]])
    """
    y = x @ weight.mT
    return y if bias is None else y + bias


# The chain rule for Y = X Wᵀ + b, where G is the gradient of Y: Gᵀ X for the weight, G W for x, and for the
# bias the sum of G over its rows, since b is broadcast to every row.
linear.gradients(
    x=lambda grad, weight: grad @ weight.conj(),
    weight=lambda grad, x: torch.tensordot(grad, x.conj(), [list(range(x.ndim - 1))] * 2),
    bias=lambda grad: grad,
)


@linear.samples
def _(make: opsmith.Make) -> Iterator[Any]:
    yield make(4, 3), make(2, 3), make(2)
    yield make(5, 7), make(3, 7)
    yield make(3), make(2, 3), make(2)
    yield make.call(make(2, 3, 5), make(4, 5), bias=make(4))
    yield make(0, 3), make(2, 3), make(2)
    yield make(1, 1), make(1, 1), None
    yield make(5, 6)[1:].mT, make(4, 3).mT[:2, :4], make(4)[::2]


Linear = linear.module(
    sizes=("in_features", "out_features"),
    parameters={"weight": ("out_features", "in_features"), "bias": ("out_features",)},
    init={"weight": opsmith.init.uniform(-0.1, 0.1), "bias": opsmith.init.uniform(-0.1, 0.1)},
    doc="""
    Example:
        >>> import torch
        >>> layer = Linear(2, 1, dtype=torch.float64)
        >>> layer, layer(torch.ones(5, 2).double()).shape
        (Linear(in_features=2, out_features=1, bias=True), torch.Size([5, 1]))
    """,
)
