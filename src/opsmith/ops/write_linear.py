"""Linear map of a few rows into existing memory, for the steps that generate text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import opsmith


@opsmith.operator("opsmith::write_linear", mutates=["y"], shapes="y: N M, x: N K, weight: M K ->")
def write_linear(y: Tensor, x: Tensor, weight: Tensor) -> None:
    """Write x Wᵀ into y, and allocate nothing.

    Args:
        y: [N, M]; written.
        x: [N, K], floating. 16 bits are summed in float32.
        weight: [M, K].

    Raises:
        ShapeError, MutationError: If a shape is wrong, or a tensor cannot be written.

    Example:
        >>> import torch
        >>> y = torch.empty(1, 2)
        >>> write_linear(y, torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]]))
        >>> y
        tensor([[11., 17.]])
    """
    y.copy_(x @ weight.mT)


write_linear.kernel(
    "cpu", cpp_file="write_linear.cpp", dtypes=[torch.float16, torch.bfloat16, torch.float32, torch.float64]
)


@write_linear.samples
def _(make: opsmith.Make) -> Iterator[Any]:
    for rows, outputs, inputs in ((3, 5, 4), (1, 2, 70), (6, 1, 3), (0, 2, 3)):
        yield make(rows, outputs), make(rows, inputs), make(outputs, inputs)
