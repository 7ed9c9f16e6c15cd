"""The author's own count of floating-point operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import opsmith

X, WEIGHT = opsmith.Make(torch.float32)(5, 3), opsmith.Make(torch.float32)(3, 2)


def _product(x: Tensor, weight: Tensor, times: int = 1, *, bias: Tensor | None = None) -> Tensor:
    return torch.from_numpy(x.numpy() @ weight.numpy()) * times


def _count(operator: Any, *args: Any, **kwargs: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        operator(*args, **kwargs)
    return counter.get_total_flops()


def test_given_for_an_opaque_operator() -> None:
    operator = opsmith.operator("flops::given", opaque=True)(_product)
    seen: list[Any] = []

    @operator.flops
    def _(x: Tensor, weight: Tensor, times: int = 1, *, bias: Tensor | None = None) -> int:
        seen.append((x.device.type, x.stride(), times, bias))
        return 2 * x.numel() * weight.shape[1] * times

    assert _count(operator, X.mT.contiguous().mT, WEIGHT, 3) == 180
    assert seen == [("meta", (1, 5), 3, None)]
    operator.flops(lambda x, weight, times=1, *, bias=None: 7)
    assert _count(operator, X, WEIGHT) == 7


def test_given_wins_over_the_reference() -> None:
    operator = opsmith.operator("flops::wins")(lambda_free)
    assert _count(operator, X, WEIGHT) == 60
    operator.flops(lambda x, weight: 1)
    assert _count(operator, X, WEIGHT) == 1


def lambda_free(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


@pytest.mark.parametrize("answer", [1.5, True, None, "many"])
def test_a_count_is_a_whole_number(answer: Any) -> None:
    operator = opsmith.operator("flops::whole")(lambda_free)
    operator.flops(lambda x, weight: answer)
    with pytest.raises(opsmith.errors.UsageError, match="must be a whole number") as caught:
        _count(operator, X, WEIGHT)
    assert "expected: int" in str(caught.value)
