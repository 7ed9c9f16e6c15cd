"""The property `batched_gradients`: several grad_outputs at once, beside one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functions import Square
from torch import Tensor

import opsmith
import opsmith.ops
from opsmith.checking import Outcome

X = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) + 0.5


def batched(checked: Any, *samples: Any, **options: Any) -> Outcome:
    report = opsmith.check(checked, samples=list(samples) or None, only=["batched_gradients"], **options)
    return next(outcome for outcome in report.outcomes if outcome.property == "batched_gradients")


class KnowsBatches(Square):
    """It gives another gradient for a batch: what stands for one is no ordinary tensor."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad * ctx.saved_tensors[0] * (2 if torch._C._functorch.is_batchedtensor(grad) else 1)


class Asks(Square):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        factor = 2 if float(grad.sum()) > -1e9 else 0
        return factor * grad * ctx.saved_tensors[0]


def test_a_right_backward_passes() -> None:
    for checked, samples in ((Square, [(X,)]), (opsmith.ops.mul, []), (opsmith.ops.linear, [])):
        found = batched(checked, *samples)
        assert (found.status, found.notes) == ("passed", ())


def test_a_backward_that_is_wrong_for_a_batch_is_found() -> None:
    (failure,) = batched(KnowsBatches, (X,)).failures
    assert (failure.cause, failure.input) == ("kernel-mismatch", "x")
    assert failure.message.startswith(
        "with `vmap` over a backward, the gradient of `x` is not what each grad_output gives alone: at"
    )


def test_a_refusal_is_no_fault() -> None:
    found = batched(Asks, (X,))
    assert found.status == "skipped", found
    assert "with `vmap` over a backward is refused: RuntimeError" in found.reason


@pytest.mark.parametrize("effort", ["quick", "thorough"])
def test_every_level_of_effort_runs(effort: Any) -> None:
    assert batched(opsmith.ops.linear, effort=effort).status == "passed"


def test_without_a_gradient_there_is_nothing_to_look_at() -> None:
    @opsmith.operator("test_batched_gradients::larger")
    def larger(x: Tensor) -> Tensor:
        return x > 0

    assert batched(larger, (X,)).reason == "there is nothing to differentiate"
