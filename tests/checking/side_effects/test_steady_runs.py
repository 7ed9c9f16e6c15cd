"""What makes runs differ is reported, and the rest is checked under fixed seeds and with fresh copies."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith

GENERATOR = torch.Generator().manual_seed(0)
X, WEIGHT = torch.randn(3, 4, generator=GENERATOR), torch.randn(4, generator=GENERATOR)
ONLY = ["forward", "gradient", "determinism", "randomness", "effects"]


class Noisy(Function):
    """A mask of NumPy's global state, and the right gradient."""

    sign = 1

    @classmethod
    def mask(cls, x: Tensor) -> Tensor:
        return torch.from_numpy(np.random.rand(*x.shape)).to(x)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        mask = Noisy.mask(x)
        ctx.save_for_backward(x, weight, mask)
        return x * weight * mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, mask = ctx.saved_tensors
        return grad * weight * mask, (grad * x * mask).sum(0)


class NoisyAndWrong(Noisy):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        by_x, by_weight = Noisy.backward(ctx, grad)
        return by_x, -by_weight


class ByPython(NoisyAndWrong):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        mask = torch.full_like(x, random.random())
        ctx.save_for_backward(x, weight, mask)
        return x * weight * mask


class Running(Function):
    """Keeps the mean of its input in a buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, mean: Tensor) -> Tensor:
        mean.mul_(0.9).add_(0.1 * x.mean(0))
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0), None


class RunningAndWrong(Running):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        by_x, by_weight, _ = Running.backward(ctx, grad)
        return by_x, -by_weight, None


class DrawsInBackward(Noisy):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad * weight * torch.rand_like(x), (grad * x).sum(0)


@opsmith.operator("steady_runs::undeclared")
def undeclared(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight + torch.rand_like(x)


undeclared.gradients(x=lambda grad, weight: grad * weight, weight=lambda grad, x: -(grad * x).sum(0))


class Dropped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        mask = torch.rand_like(x)
        ctx.save_for_backward(x, weight, mask)
        return x * weight * mask

    backward = Noisy.backward


@opsmith.operator("steady_runs::drawn_by_numpy", opaque=True)
def drawn_by_numpy(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight * float(np.random.rand())


drawn_by_numpy.fake(lambda x, weight: torch.empty_like(x))


@opsmith.operator("steady_runs::noise")
def noise(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight + torch.rand_like(x)


def check(checked: Any, *samples: Any, **options: Any) -> opsmith.Report:
    return opsmith.check(checked, samples=[samples], effort="quick", only=ONLY, **options)


def found(report: opsmith.Report) -> set[tuple[str, str | None, str]]:
    return {(each.property, each.input, each.cause) for each in report.failures}


@pytest.mark.slow
@pytest.mark.every(8)
@pytest.mark.parametrize("wrong", [NoisyAndWrong, ByPython, undeclared])
def test_undeclared_randomness_hides_no_wrong_gradient(wrong: Any) -> None:
    state = torch.get_rng_state()
    report = check(wrong, X, WEIGHT)
    assert ("gradient", "weight", "sign") in found(report), str(report)
    assert ("randomness", None, "nondeterministic") in found(report)
    assert all(each.follows is None for each in report.failures if each.property == "randomness")
    assert "two runs give different numbers; the other properties ran under fixed seeds" in report.remarks
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.slow
@pytest.mark.every(8)
@pytest.mark.parametrize("drawing", [noise, drawn_by_numpy, Noisy])
def test_other_numbers_of_a_second_run_follow_from_undeclared_randomness(drawing: Any) -> None:
    report = opsmith.check(drawing, samples=[(X, WEIGHT)], effort="quick")
    errors = [each for each in report.failures if each.severity == "error"]
    assert {each.property for each in errors if each.follows is None} == {"randomness"}, str(report)
    assert {each.follows for each in errors} <= {None, "randomness"}


def test_the_declaration_of_randomness_is_named() -> None:
    adopted = opsmith.adopt(Dropped, name="steady_runs::dropped")
    assert "Declare it with `random=True`" in randomness_of(noise)
    assert 'Declare it with `kind="stochastic"`' in randomness_of(adopted)


def randomness_of(drawing: Any) -> str:
    report = opsmith.check(drawing, samples=[(X, WEIGHT)], effort="quick", only=["randomness"])
    return report.failures[0].message


@pytest.mark.slow
@pytest.mark.every(5)
@pytest.mark.parametrize("isolate", [False, 60])
def test_a_buffer_that_changes_hides_no_wrong_gradient(isolate: Any) -> None:
    report = check(RunningAndWrong, X, WEIGHT, torch.zeros(4), isolate=isolate)
    roots = {(each.property, each.input, each.cause) for each in report.failures if each.follows is None}
    assert roots == {("gradient", "weight", "sign"), ("effects", "mean", "mutates-input")}, str(report)
    words = (
        "two runs give different numbers; the other properties ran with fresh copies of `mean` for each call"
    )
    assert words in report.remarks


@pytest.mark.slow
@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("right", "samples", "properties"),
    [
        (Noisy, (X, WEIGHT), {"randomness", "determinism"}),
        (Running, (X, WEIGHT, torch.zeros(4)), {"effects"}),
    ],
)
def test_nothing_else_is_found_in_right_ones(right: Any, samples: Any, properties: set[str]) -> None:
    report = check(right, *samples)
    assert {each.property for each in report.failures} == properties, str(report)
    assert all(
        each.status == "passed" for each in report.outcomes if each.property in ("forward", "gradient")
    )


class Centred(Function):
    """Works in the memory of its input where a flag says so, and leaves the mean out of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, overwrite_x: bool) -> Tensor:
        return (x.sub_(x.mean(0)) if overwrite_x else x - x.mean(0)) * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad, None


class Scratch(Function):
    """Takes its input for a scratch space in one of its modes, and has a gradient of the wrong sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mode: str) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        if mode == "lean":
            x.zero_()
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return -grad * y, None


@pytest.mark.parametrize(
    ("function", "choice", "cause", "severity"),
    [(Centred, False, "missing-term", "warning"), (Scratch, "plain", "sign", "error")],
)
def test_a_write_on_derived_inputs_alone_hides_nothing_of_the_samples(
    function: Any, choice: Any, cause: str, severity: str
) -> None:
    report = opsmith.check(function, samples=[(X, choice)], effort="quick", only=ONLY)
    found = {(each.property, each.cause): each for each in report.failures}
    assert {*found} == {("gradient", cause), ("effects", "mutates-input")}, str(report)
    write = found["effects", "mutates-input"]
    assert (write.severity, write.follows) == (severity, None)
    (number,) = write.evidence["derived inputs alone"].split(", ")
    assert report.remarks == (
        f"a call writes into an argument or two runs differ, but only on derived inputs (sample {number}): "
        "the other properties ran without these inputs",
    )
    assert found["gradient", cause].evidence["sample"].startswith("sample 0 ")


def test_a_write_that_a_sample_shows_is_an_error_whatever_the_flag() -> None:
    report = opsmith.check(Centred, samples=[(X, True), (X, False)], effort="quick", only=["effects"])
    (write,) = report.failures
    assert (write.cause, write.severity) == ("mutates-input", "error")
    assert "derived inputs alone" not in write.evidence


def test_a_backward_that_draws_by_itself_is_compared_with_nothing() -> None:
    report = check(DrawsInBackward, X, WEIGHT)
    gradient = next(each for each in report.outcomes if each.property == "gradient")
    assert gradient.reason.startswith("not compared: two runs give different numbers")
