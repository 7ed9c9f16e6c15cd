"""The property `autocast`: dtypes, roundings, backwards outside of the region, and the region itself."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp import custom_bwd, custom_fwd
from torch.autograd import Function

import opsmith
from opsmith.checking import Outcome
from opsmith.checking.properties.torch.autocast import Casting

X = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) + 0.5
W = torch.rand(2, 4, generator=torch.Generator().manual_seed(1)) + 0.5
names = itertools.count()


def autocast(checked: Any, *samples: Any, **options: Any) -> Outcome:
    report = opsmith.check(checked, samples=list(samples) or None, only=["autocast"], **options)
    return next(outcome for outcome in report.outcomes if outcome.property == "autocast")


def declare(reference: Any, **options: Any) -> Any:
    return opsmith.operator(f"test_autocast::op{next(names)}", **options)(reference)


class Plain(Function):
    """As the tutorial writes it: nothing in it knows of autocast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.mT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w, grad.mT @ x


class Fitting(Function):
    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return Plain.forward(ctx, x, w)

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Plain.backward(ctx, grad)


class ForwardAlone(Fitting):
    backward = Plain.backward


class WrongBesides(Fitting):
    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return Plain.forward(ctx, x, w) * (2 if torch.is_autocast_enabled("cpu") else 1)


class WrongGradientBesides(Fitting):
    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        factor = 2 if grad.dtype == torch.bfloat16 else 1
        return factor * (grad @ w), grad.mT @ x


class LeavesItOff(Fitting):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        torch.set_autocast_enabled("cpu", False)
        return Plain.forward(ctx, x, w)


def test_a_class_that_fits_passes() -> None:
    found = autocast(Fitting, (X, W))
    assert (found.status, found.notes) == ("passed", ())


def test_a_backward_that_does_not_fit_is_found_where_the_class_claims_autocast() -> None:
    (failure,) = autocast(ForwardAlone, (X, W)).failures
    assert (failure.cause, failure.input) == ("dtype", "x, w")
    assert failure.message.startswith(
        "after a forward under autocast to bfloat16, the backward raises RuntimeError: "
    )
    assert "Under autocast, the dtypes of saved tensors and of grad_outputs differ" in failure.message


def test_a_backward_that_does_not_fit_is_noted_where_the_class_knows_nothing_of_autocast() -> None:
    found = autocast(Plain, (X, W))
    assert found.status == "passed"
    assert "the backward raises RuntimeError" in found.notes[0]
    assert found.notes[0].endswith(
        "`torch.amp.custom_fwd` over the forward and `custom_bwd` over the backward make the dtypes equal"
    )


@pytest.mark.parametrize(
    ("wrong", "cause", "input", "says"),
    [
        (
            WrongBesides,
            "kernel-mismatch",
            "result",
            "under autocast `result` differs by more than the rounding to",
        ),
        (
            WrongGradientBesides,
            "unknown",
            "x",
            "after a forward under autocast, the gradient of `x` differs by more than",
        ),
    ],
)
def test_numbers_that_rounding_does_not_explain_are_found(
    wrong: Any, cause: str, input: str, says: str
) -> None:
    (failure, *_) = autocast(wrong, (X, W)).failures
    assert (failure.cause, failure.input) == (cause, input)
    assert failure.message.startswith(says)


def test_a_changed_state_of_autocast_is_found() -> None:
    failure = next(each for each in autocast(LeavesItOff, (X, W)).failures if each.cause == "side-effect")
    assert "changes the state of autocast" in failure.message
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("rule", ["promote", "lower", "float32"])
def test_an_operator_keeps_each_rule(rule: Any) -> None:
    def matmul(x: Tensor, w: Tensor) -> Tensor:
        return x @ w.mT

    operator = declare(matmul, autocast=rule)
    operator.gradients(x=lambda grad, w: grad @ w, w=lambda grad, x: grad.mT @ x)
    found = autocast(operator, (X, W))
    assert (found.status, found.notes) == ("passed", ())


def test_another_dtype_than_the_rule_promises_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    monkeypatch.setattr(Casting, "cast", lambda self, flat: [each.double() for each in flat])
    (failure,) = autocast(declare(double), (X,)).failures
    assert (failure.cause, failure.input) == ("dtype", "result")
    assert failure.message == (
        "under autocast `result` has the dtype torch.float32, and autocast='promote' promises torch.float64"
    )


def test_a_call_that_raises_under_autocast_alone_is_noted() -> None:
    class Strict(Plain):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            if torch.is_autocast_enabled("cpu"):
                raise TypeError("not under autocast")
            return Plain.forward(ctx, x, w)

    found = autocast(Strict, (X, W))
    assert (found.status, found.reason) == (
        "skipped",
        "under autocast, the operator raises TypeError: not under autocast",
    )


def test_mixed_dtypes_that_raise_are_found_where_a_rule_makes_them_one() -> None:
    def matmul(x: Tensor, w: Tensor) -> Tensor:
        return x @ w.mT

    def kernel(x: Tensor, w: Tensor) -> Tensor:
        if torch.equal(x, x.bfloat16().to(x)):  # it was in bfloat16 before it was promoted
            raise RuntimeError("not this one")
        return x @ w.mT

    (failure, *_) = autocast(declare(matmul).kernel("cpu", kernel), (X, W), effort="quick").failures
    assert (failure.cause, failure.input) == ("raises", "x")
    assert failure.message == (
        "under autocast, with only `x` in bfloat16, the operator raises RuntimeError: not this one"
    )


def test_what_has_no_floating_argument_is_skipped() -> None:
    def shifted(x: Tensor) -> Tensor:
        return x << 1

    found = autocast(declare(shifted), (torch.arange(3),))
    assert (found.status, found.reason) == (
        "skipped",
        "no sample has a floating tensor, which autocast casts",
    )
