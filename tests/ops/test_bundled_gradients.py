"""torch's own checks of the bundled operators' derivatives, on every sample of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith.core.call_arguments import CallArguments
from opsmith.core.samples import samples_of
from opsmith.ops import add, exp, involution, linear, mul
from opsmith.ops.involution import involution_input_gradient, involution_weight_gradient

OPERATORS = (exp, mul, add, linear, involution, involution_input_gradient, involution_weight_gradient)


def calls(operator: opsmith.Operator[..., Any], dtype: torch.dtype) -> list[CallArguments]:
    specification = operator.specification
    assert specification.samples is not None
    return samples_of(specification.samples, opsmith.Make(dtype), specification.schema, operator.name)


def matrix() -> list[Any]:
    return [
        pytest.param(
            operator,
            call,
            id=f"{operator.specification.short_name}-{dtype}-sample{number}",
            marks=pytest.mark.slow if dtype.is_complex and number else (),
        )
        for operator in OPERATORS
        for dtype in (torch.float64, torch.complex128)
        for number, call in enumerate(calls(operator, dtype))
    ]


# torch warns of its own deprecated names when it first loads the formulas of forward mode.
@pytest.mark.every(12)
@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("operator", "call"), matrix())
def test_every_order_and_both_modes(operator: opsmith.Operator[..., Any], call: CallArguments) -> None:
    arguments = [
        value.requires_grad_() if isinstance(value, Tensor) else value
        for value in operator.specification.schema.call_values(call.args, call.kwargs)
    ]
    assert torch.autograd.gradcheck(operator, arguments, check_forward_ad=True, fast_mode=True)
    if any(isinstance(value, Tensor) and value.numel() == 0 for value in arguments):
        return  # torch's second-order check cannot take a mean over nothing
    assert torch.autograd.gradgradcheck(operator, arguments, check_fwd_over_rev=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(operator, arguments, gen_non_contig_grad_outputs=True, fast_mode=True)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.specification.short_name)
def test_third_order(operator: opsmith.Operator[..., Any]) -> None:
    call = calls(operator, torch.float64)[0]
    arguments = [
        value.requires_grad_() if isinstance(value, Tensor) else value
        for value in operator.specification.schema.call_values(call.args, call.kwargs)
    ]
    tensors = [value for value in arguments if isinstance(value, Tensor)]

    def third(function: Any) -> list[Tensor]:
        found: list[Tensor] = []
        value = function(*arguments).pow(4).sum()
        for _ in range(3):
            first, *_ = torch.autograd.grad(value, tensors, create_graph=True)
            value = first.pow(2).sum()
            found.append(first)
        return found

    torch.testing.assert_close(third(operator), third(operator.reference))
