"""Calls of the bundled operators, and layouts: what their tests form a matrix of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith.ops import add, exp, involution, linear, mul
from opsmith.ops.involution import involution_input_gradient, involution_weight_gradient

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)


@dataclass(frozen=True)
class Case:
    """A call of an operator: the shapes of its tensors, then its other arguments."""

    operator: opsmith.Operator[..., Any]
    shapes: tuple[tuple[int, ...] | None, ...]
    others: tuple[Any, ...] = ()

    def __str__(self) -> str:
        shapes = ["none" if shape is None else "x".join(map(str, shape)) or "scalar" for shape in self.shapes]
        others = [str(other).replace(" ", "") for other in self.others]
        return "-".join([self.operator.specification.short_name, *shapes, *others])

    def tensors(self, dtype: torch.dtype, device: str = "cpu") -> list[Tensor | None]:
        make = opsmith.Make(dtype, torch.device(device))
        return [None if shape is None else make(*shape) for shape in self.shapes]


CASES = [
    *(Case(exp, (shape,)) for shape in [(3, 5), (2, 3, 7), (1,), (), (0, 3)]),
    *(
        Case(operator, shapes)
        for operator in (mul, add)
        for shapes in [
            ((3, 5), (3, 5)),
            ((3, 5), (5,)),
            ((2, 1, 3), (4, 1)),
            ((), (3, 7)),
            ((), ()),
            ((0, 3), (1, 3)),
        ]
    ),
    *(
        Case(linear, shapes)
        for shapes in [
            ((5, 3), (2, 3), (2,)),
            ((5, 3), (2, 3), None),
            ((2, 3, 7), (5, 7), (5,)),
            ((7,), (3, 7), (3,)),
            ((1, 1), (1, 1), (1,)),
            ((0, 3), (2, 3), (2,)),
        ]
    ),
    Case(involution, ((2, 4, 5, 7), (2, 2, 3, 3, 5, 7)), (1, 1, 1)),
    Case(involution, ((3, 3, 7, 5), (3, 1, 3, 3, 4, 3)), (2, 1, 1)),
    Case(involution, ((1, 6, 9, 8), (1, 3, 3, 2, 5, 8)), ((2, 1), (3, 1), (3, 2))),
    Case(involution, ((2, 3, 4, 4), (2, 3, 1, 1, 4, 4)), ()),
    Case(involution, ((1, 2, 7, 7), (1, 1, 7, 7, 1, 1)), ()),
    Case(involution, ((0, 4, 3, 3), (0, 2, 3, 3, 3, 3)), (1, 1)),
    Case(involution_input_gradient, ((3, 3, 4, 3), (3, 1, 3, 3, 4, 3)), ((7, 5), 2, 1, 1)),
    Case(involution_weight_gradient, ((3, 3, 4, 3), (3, 3, 7, 5)), (1, (3, 3), 2, 1, 1)),
]


def transposed(tensor: Tensor) -> Tensor:
    """Same values, dimensions laid out in reverse order."""
    order = list(reversed(range(tensor.ndim)))
    return tensor.permute(order).contiguous().permute(order)


def sliced(tensor: Tensor) -> Tensor:
    """Same values, every second element of a larger buffer of NaN, and not from its beginning."""
    buffer = tensor.new_full([2 * size + 3 for size in tensor.shape] or [3], torch.nan)
    view = buffer[tuple(slice(3, 2 * size + 3, 2) for size in tensor.shape)] if tensor.ndim else buffer[2]
    return view.copy_(tensor)


def expanded(tensor: Tensor) -> Tensor:
    """The first slice of every dimension but the last, repeated with stride 0."""
    if tensor.ndim == 0 or tensor.numel() == 0:
        return tensor
    return tensor[(slice(0, 1),) * (tensor.ndim - 1)].expand(tensor.shape)


def channels_last(tensor: Tensor) -> Tensor:
    """Same values, channels next to one another."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "transposed": transposed,
    "sliced": sliced,
    "expanded": expanded,
    "channels_last": channels_last,
}


def matrix() -> list[Any]:
    """Every case in every dtype and layout that makes sense for it, on the CPU and on CUDA.

    On the CPU a diagonal is not slow: every case in every dtype, every dtype in every layout. Those of
    involution in 16 bits are slow: its kernels take ten seconds to build for a dtype.
    """
    cuda = (
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    )
    return [
        pytest.param(
            case,
            dtype,
            device,
            arrange,
            id=f"{case}-{str(dtype)[6:]}-{device}-{name}",
            marks=(
                *marks,
                *(
                    [pytest.mark.slow]
                    if device == "cpu"
                    and (
                        (i + j + k) % len(LAYOUTS)
                        or (case.operator.name.startswith("opsmith::involution") and dtype.itemsize == 2)
                    )
                    else []
                ),
            ),
        )
        for device, marks in (("cpu", ()), ("cuda", cuda))
        for i, case in enumerate(CASES)
        for j, dtype in enumerate(REAL + COMPLEX)
        for k, (name, arrange) in enumerate(LAYOUTS.items())
        if name != "channels_last" or case.operator.name.startswith("opsmith::involution")
    ]
