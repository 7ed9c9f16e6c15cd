"""An error in a kernel on a GPU: it is a finding, and the GPU cannot be used after it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith.checking import exceptions


@opsmith.operator("lost_gpu::doubled")
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.samples
def _(make: opsmith.Make):
    yield (make(3),)


doubled.gradients(x=lambda grad: grad * 2)


MESSAGE = "CUDA error: an illegal memory access was encountered"


def test_it_is_a_finding_and_nothing_else_runs() -> None:
    calls = []

    @doubled.kernel("cpu")
    def _(x: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) > 3:
            raise torch.AcceleratorError(MESSAGE)
        return x * 2

    report = opsmith.check(doubled, only=["forward", "gradient", "vmap"])
    (failure,) = report.failures
    assert (failure.property, failure.cause) == ("forward", "raises")
    late = (
        "a GPU reports the error only after the call: `CUDA_LAUNCH_BLOCKING=1` shows the call that caused it"
    )
    assert f"AcceleratorError: {MESSAGE}" in failure.message
    assert late in failure.message
    reasons = {each.property: each.reason for each in report.outcomes}
    expected = "not run: after the error in `forward` this process can no longer use the GPU"
    assert reasons["gradient"] == reasons["vmap"] == expected


def test_after_another_error_the_rest_runs() -> None:
    @doubled.kernel("cpu")
    def _(x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise torch.AcceleratorError("CUDA error: invalid configuration argument")
        return x * 2

    report = opsmith.check(doubled, only=["forward", "vmap"])
    assert {failure.property for failure in report.failures} >= {"forward"}
    assert not any("use the GPU" in each.reason for each in report.outcomes)


def test_it_is_the_operator_s_though_the_check_itself_is_told() -> None:
    for error, ours in [(RuntimeError("odd"), True), (torch.AcceleratorError(MESSAGE), False)]:
        code = compile("raise error", exceptions.__file__, "exec")
        try:
            exec(code, {"error": error})
        except RuntimeError as raised:
            with pytest.raises(RuntimeError) if ours else nullcontext():
                exceptions.refuse_own(raised)
