"""A call whose results autograd follows only sometimes is a finding, and not the end of the check."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import Function

import opsmith

CALLS = [0]


class LosesItsGraph(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        CALLS[0] += 1
        ctx.save_for_backward(x)
        y = x * x
        if CALLS[0] % 3 == 0:
            ctx.mark_non_differentiable(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


@pytest.mark.parametrize("before", range(3))
def test_a_graph_that_is_there_only_sometimes_is_told(before: int) -> None:
    CALLS[0] = before
    samples = [(torch.tensor([0.5, -1.0, 2.0]),)]
    report = opsmith.check(LosesItsGraph, samples=samples, effort="quick", only=["determinism", "state"])
    (failure,) = report.failures
    assert failure.cause == "nondeterministic"
    assert "there is none (None)" in failure.message or "where there was none" in failure.message
