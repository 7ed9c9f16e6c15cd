"""Values and gradients of the bundled operators, against their references in double precision.

The tolerance is the bound of rounding analysis: n accumulated terms may be off by about n eps times the sum
of their absolute values. Both n and that sum come from the reference, run on ones and on absolute values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from bundled_cases import Case, matrix
from torch import Tensor

from opsmith.ops import exp

ROUNDINGS_OF_ONE_TERM = 4


@dataclass(frozen=True)
class Answer:
    """The result of a call and the gradients of its tensors."""

    result: Tensor
    gradients: tuple[Tensor, ...]

    def all(self) -> tuple[Tensor, ...]:
        return self.result, *self.gradients


def answer(
    function: Callable[..., Tensor], case: Case, tensors: Sequence[Tensor | None], grad: Tensor | None = None
) -> Answer:
    leaves = [tensor if tensor is None else tensor.detach().requires_grad_() for tensor in tensors]
    result = function(*leaves, *case.others)
    given = [leaf for leaf in leaves if leaf is not None]
    grad = torch.ones_like(result) if grad is None else grad
    return Answer(result.detach(), torch.autograd.grad(result, given, grad))


def wide(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def magnitude(case: Case, tensor: Tensor | None) -> Tensor | None:
    """Input with which the reference returns the sum of absolute values: |exp(z)| is exp(Re z)."""
    if tensor is None:
        return None
    return tensor.real if case.operator is exp else tensor.abs()


@pytest.mark.every(8)
@pytest.mark.parametrize(("case", "dtype", "device", "layout"), matrix())
def test_value_and_gradients(
    case: Case, dtype: torch.dtype, device: str, layout: Callable[[Tensor], Tensor]
) -> None:
    tensors = [None if tensor is None else layout(tensor) for tensor in case.tensors(dtype, device)]
    reference = case.operator.reference
    grad = layout(torch.rand_like(reference(*tensors, *case.others)) - 0.5)

    got = answer(case.operator, case, tensors, grad)

    exact = [wide(tensor) for tensor in tensors]
    truth = answer(reference, case, exact, wide(grad))
    bound = answer(reference, case, [magnitude(case, tensor) for tensor in exact], wide(grad).abs())
    terms = answer(reference, case, [tensor if tensor is None else tensor.real * 0 + 1 for tensor in exact])
    limits = torch.finfo(dtype)
    given = [tensor for tensor in tensors if tensor is not None]
    for found, right, size, count, like in zip(
        got.all(), truth.all(), bound.all(), terms.all(), [got.result, *given], strict=True
    ):
        assert found.dtype == dtype
        assert found.shape == right.shape == like.shape
        steps = ROUNDINGS_OF_ONE_TERM + count.abs()
        tolerance = steps * (limits.eps * size + limits.eps * limits.smallest_normal)
        assert torch.all((wide(found) - right).abs() <= tolerance)
