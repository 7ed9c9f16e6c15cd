"""Lost digits: operations on tensors of lower precision, and arguments rounded to a few bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.samples.cases import LOW_PRECISION, dtype_name
from opsmith.core.call_arguments import tensors_in
from opsmith.judging.answer import Answer
from opsmith.judging.judge import judge
from opsmith.torch_library import capabilities

FEWER = (torch.float32, *LOW_PRECISION)
"""dtypes of lower precision than float64."""
PARTS = 16
"""Denominator: multiples of 1 over this number are exact in every dtype."""


def low_precision_operand(compute: Callable[[], Any], *, mixed: bool = True) -> str | None:
    """Find the first operation that takes a tensor of lower precision than float64.

    Numbers that every dtype represents exactly, such as a mask's, do not count.

    Args:
        compute: Computation in float64.
        mixed: True if the operation must also take a float64 tensor.

    Example:
        >>> x = torch.ones(2, dtype=torch.float64)
        >>> low_precision_operand(lambda: x * torch.full((2,), 0.1))
        'aten.mul.Tensor takes float32 together with float64'
        >>> low_precision_operand(lambda: x * 0.1)
    """
    found: list[str] = []

    def given(operator: Any, args: Sequence[Any]) -> None:
        tensors = [*tensors_in(list(args))]
        wide = [each for each in tensors if each.dtype in (torch.float64, torch.complex128)]
        if found or (mixed and not wide):
            return
        for each in tensors:
            if each.dtype in FEWER and _rounded(each):
                found[:] = [
                    f"{operator} takes {dtype_name(each.dtype)}{' together with float64' * bool(wide)}"
                ]

    with capabilities.observe_operators(lambda operator, kwargs: None, given):
        compute()
    return found[0] if found else None


def _rounded(tensor: Tensor) -> bool:
    return bool((tensor.detach().double() * PARTS).frac().any())


DROPPED = {"TF32 (10 bits)": 13, "bfloat16 (7 bits)": 16}
"""Formats to which kernels round float32 internally, and the number of mantissa bits that they drop."""


def rounded_arguments(got: Tensor, right: Answer, flat: Sequence[Any]) -> str | None:
    """Name the format for which a result is right if its arguments are rounded to it; else None.

    Matrix units round their arguments, to the nearest number or towards zero, and sum in float32.

    Example:
        >>> from opsmith.judging.answer import Computation
        >>> a, b = (torch.rand(3, 3, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
        >>> product = Computation.of(lambda flat: [flat[0] @ flat[1]], [a, b], torch.Generator())
        >>> (right,) = product.at([a, b], torch.float32)
        >>> rounded_arguments(a.bfloat16().float() @ b.bfloat16().float(), right, [a, b])
        'bfloat16 (7 bits)'
    """
    if right.computation is None or right.dtype != torch.float32:
        return None
    for name, dropped in DROPPED.items():
        for added in (1 << dropped - 1, 0):
            fewer = [_with_fewer_bits(value, dropped, added) for value in flat]
            if not judge(got, right.computation.at(fewer, right.dtype)[right.position]).wrong:
                return name
    return None


def _with_fewer_bits(value: Any, dropped: int, added: int) -> Any:
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return value
    bits = value.detach().contiguous().view(torch.int32) + added
    return (bits >> dropped << dropped).view(torch.float32)
