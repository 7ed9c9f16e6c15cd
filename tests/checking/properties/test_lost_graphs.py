"""A call whose results autograd follows only sometimes is a finding, and not the end of the check."""

from __future__ import annotations

import sys
import threading
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
    assert failure.cause == "stale-state"
    one, other = ("None", "a tensor") if "it is None" in failure.message else ("a tensor", "None")
    assert f"it is {one}, where {other} is right" in failure.message


class ReturnsOtherThings(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        CALLS[0] += 1
        ctx.save_for_backward(x)
        return (x * x, x + 1) if CALLS[0] % 4 else x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * grads[0] + (grads[1] if len(grads) > 1 else 0)


@pytest.mark.parametrize("before", range(4))
@pytest.mark.parametrize("name", ["determinism", "state"])
def test_results_of_another_structure_are_told_in_words(name: str, before: int) -> None:
    CALLS[0] = before
    samples = [(torch.tensor([0.5, -1.0, 2.0]),)]
    report = opsmith.check(ReturnsOtherThings, samples=samples, effort="quick", only=[name])
    failure = report.failures[0]
    one, two = "a tensor", "2 values"
    words = {f"{mine}, but an earlier call returned {first}" for mine, first in ((one, two), (two, one))}
    assert any(each in failure.message for each in words), failure.message


class LeavesInThreads(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            sys.exit(3)
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def test_an_exit_in_a_thread_is_told() -> None:
    samples = [(torch.tensor([0.5, -1.0, 2.0]),)]
    report = opsmith.check(LeavesInThreads, samples=samples, effort="quick", only=["state"])
    (failure,) = report.failures
    assert "in four threads at once, raises SystemExit: 3" in failure.message
