"""Elementwise operators: exponential, product and sum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

import opsmith


@opsmith.operator("opsmith::exp", autocast="float32", batching="elementwise")
def exp(x: Tensor) -> Tensor:
    """Raise e to the power of each element; the backward needs only the result.

    Args:
        x: Any shape; floating or complex (whole numbers become floating).

    Returns:
        Shape of `x`; its dtype, or torch's default floating dtype for whole numbers.

    Example:
        >>> import torch
        >>> exp(torch.tensor([0.0, 1.0]))
        tensor([1.0000, 2.7183])
    """
    return x.exp()


# d/dx exp(x) = exp(x), which is the result.
exp.gradients(x=lambda grad, result: grad * result.conj())


@exp.samples
def _(make: opsmith.Make) -> Iterator[Any]:
    yield (make(3, 5),)
    yield (make(7),)
    yield (make(),)
    yield (make(0, 3),)
    yield (make(4, 6).mT[1:],)


@opsmith.operator("opsmith::mul", batching="elementwise")
def mul(x: Tensor, y: Tensor) -> Tensor:
    """Multiply element by element.

    Args:
        x: Any shape and dtype.
        y: A shape that broadcasts with the shape of `x`; any dtype.

    Returns:
        The shape that both broadcast to, and the dtype that both promote to.

    Example:
        >>> import torch
        >>> mul(torch.tensor([1.0, 2.0]), torch.tensor([[3.0], [4.0]]))
        tensor([[3., 6.],
                [4., 8.]])
    """
    return x * y


# Formulas ignore broadcasting: opsmith sums a gradient over the dimensions that broadcasting added.
mul.gradients(
    x=lambda grad, y: grad * y.conj(),
    y=lambda grad, x: grad * x.conj(),
)


@opsmith.operator("opsmith::add", batching="elementwise")
def add(x: Tensor, y: Tensor) -> Tensor:
    """Add element by element; the backward needs nothing.

    Args:
        x: Any shape and dtype.
        y: A shape that broadcasts with the shape of `x`; any dtype.

    Returns:
        The shape that both broadcast to, and the dtype that both promote to.

    Example:
        >>> import torch
        >>> add(torch.tensor([1.0, 2.0]), torch.tensor(0.5))
        tensor([1.5000, 2.5000])
    """
    return x + y


add.gradients(x=lambda grad: grad, y=lambda grad: grad)


@mul.samples
@add.samples
def _(make: opsmith.Make) -> Iterator[Any]:
    yield make(3, 5), make(3, 5)
    yield make(3, 5), make(5)
    yield make(4, 1, 3), make(2, 1)
    yield make(), make(7)
    yield make(0, 3), make(1, 3)
    yield make(5, 3).mT, make(6, 5)[::2]


Exp = exp.module(
    doc="""
    Example:
        >>> import torch
        >>> Exp()(torch.tensor([0.0, 1.0]))
        tensor([1.0000, 2.7183])
    """
)
Mul = mul.module(
    doc="""
    Example:
        >>> import torch
        >>> Mul()(torch.tensor([1.0, 2.0]), torch.tensor(3.0))
        tensor([3., 6.])
    """
)
Add = add.module(
    doc="""
    Example:
        >>> import torch
        >>> Add()(torch.tensor([1.0, 2.0]), torch.tensor(0.5))
        tensor([1.5000, 2.5000])
    """
)
