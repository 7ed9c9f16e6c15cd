"""Every failure that follows from no other has a replay, and the lines that were run show its cause."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import wrong_batching
import wrong_effects
import wrong_gradients
import wrong_results
import wrong_writes
from class_mutants import MUTANTS
from mutants import WRONG
from torch import Tensor
from torch.autograd import Function

import opsmith

ENTERED = (wrong_batching, wrong_effects, wrong_gradients, wrong_results, wrong_writes)
"""Modules that enter what is tried here."""

SHOWN = {
    "kernel_writes_into_its_input": "assert torch.equal(x, before), x",
    "formula_writes_into_grad": "assert torch.equal(grad, torch.ones_like(y)), grad",
    "kernel_raises": "operator(x=x)",
    "nondeterministic": "assert torch.equal(operator(x=x), operator(x=x))",
    "ignores_grad": "torch.testing.assert_close(two, 2 * one)",
    "detached_in_the_formula": "torch.autograd.gradgradcheck(lambda x: operator(x=x), (x,))",
    "tangent_by_two": "torch.autograd.gradcheck(lambda x: operator(x=x), (x,), check_forward_ad=True, ",
}
AGAIN = ("fake_shape", "wrong_at_one", "not_elementwise")


def failures_of(name: str, **options: Any) -> list[opsmith.Failure]:
    wrong = WRONG[name]
    report = opsmith.check(wrong.operator, effort="quick", only=[wrong.property], **options)
    return [failure for failure in report.failures if failure.follows is None]


def run(script: str) -> None:
    exec(script, {"__name__": "replay"})


@pytest.mark.parametrize("name", SHOWN)
def test_lines_show_the_cause(name: str) -> None:
    (failure,) = failures_of(name)
    assert failure.replay is not None
    assert failure.replay.splitlines()[-1].startswith(SHOWN[name])
    with pytest.raises(Exception) as raised:  # noqa: PT011  # which one, the property's failure says
        run(failure.replay)
    said = failure.evidence.get("exception")
    assert said in (None, type(raised.value).__name__)


@pytest.mark.parametrize("name", AGAIN)
def test_where_no_lines_do_the_property_runs_again(name: str) -> None:
    (failure,) = failures_of(name)
    assert failure.replay is not None
    assert f'only=["{WRONG[name].property}"], seed=0, effort="quick"' in failure.replay
    with pytest.raises(AssertionError):
        run(failure.replay)


def test_what_may_kill_the_process_is_not_run_in_it() -> None:
    (failure,) = failures_of("kernel_raises", isolate=True)
    assert failure.replay is not None
    assert failure.replay.splitlines()[-1] == "assert not report.failures, report"


def test_a_class_is_applied() -> None:
    checked, samples = MUTANTS["writes_into_input"].build()
    (failure,) = opsmith.check(checked, samples=samples, only=["effects"], effort="quick").failures
    assert failure.replay is not None
    assert "Writes.apply(x)\nassert torch.equal(x, before), x" in failure.replay


class Remembers(Function):
    """It keeps its state on the class, where another call replaces it."""

    kept: Any = None

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        Remembers.kept = x > 0
        return x.relu()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * Remembers.kept


@pytest.mark.parametrize("sizes", [(3, 4), (20, 20)], ids=["written", "too long"])
def test_a_class_is_checked_again_on_the_samples_that_were_given(sizes: Any) -> None:
    drawn = torch.Generator().manual_seed(0)  # others may have equal signs: nothing is wrong then
    samples = [(torch.rand(each, generator=drawn) - 0.5,) for each in (sizes, (2, 3))]
    failure = opsmith.check(Remembers, samples=samples, only=["state"], effort="quick").failures[0]
    assert failure.replay is not None
    if sizes == (20, 20):
        assert "samples = ...  # insert the samples of the check" in failure.replay
        failure_again = failure.replay.replace("samples = ...", "samples = given")
    else:
        failure_again = failure.replay
    with pytest.raises(AssertionError, match="FAILED: state"):
        exec(failure_again, {"__name__": "replay", "given": samples})


def test_a_death_on_one_line_is_told_once() -> None:
    report = opsmith.check(Dies, samples=[(torch.rand(3, 4),)], effort="quick", isolate=True, only=DYING)
    assert [failure.follows for failure in report.failures] == [None, "linearity", "linearity"]


def test_arguments_that_are_given_by_name_are_written_by_name() -> None:
    @torch.library.custom_op("replaying::scaled", mutates_args=())
    def scaled(x: Tensor, *, scale: float) -> Tensor:
        return x * scale

    @scaled.register_fake
    def _(x: Tensor, *, scale: float) -> Tensor:
        return x.new_empty(3)

    samples = [opsmith.Make().call(torch.ones(2), scale=2.0)]
    (failure,) = opsmith.check(scaled, samples=samples, effort="quick", only=["fake"]).failures
    assert failure.replay is not None
    assert "    opsmith.Make().call(torch.tensor([1.0, 1.0]), scale=2.0),\n" in failure.replay
    with pytest.raises(AssertionError, match="fake-mismatch"):
        run(failure.replay)


DYING = ["linearity", "gradient", "determinism"]


class Dies(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSEGV)


@torch.library.custom_op("test_replaying::clip", mutates_args=())
def clip(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return x.clamp(low, high)


def keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.low, ctx.high = inputs
    ctx.save_for_backward(x)


def clip_backward(ctx: Any, grad: Any) -> Any:
    (x,) = ctx.saved_tensors
    return grad * ((x > ctx.low) | (x < ctx.high)), None, None


clip.register_autograd(clip_backward, setup_context=keep)


@pytest.mark.slow
def test_a_custom_op_is_registered_by_the_script_and_its_backward_is_named() -> None:
    samples = [(torch.linspace(-2, 2, 8), -0.5, 0.5), (torch.linspace(-1, 1, 5), -1.5, 0.2)]
    failure = opsmith.check(clip, samples=samples, only=["gradient"], effort="quick").failures[0]
    line = clip_backward.__code__.co_firstlineno
    assert failure.where == f"{__file__}:{line}"
    assert failure.replay is not None
    assert f"\nimport {__name__}  # test_replaying::clip: {__file__}:" in failure.replay
    with pytest.raises(AssertionError, match="not close"):
        run(failure.replay)
