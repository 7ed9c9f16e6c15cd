"""Every failure that follows from no other has a replay, and the lines that were run show its cause."""

from __future__ import annotations

from typing import Any

import pytest
import wrong_batching
import wrong_effects
import wrong_gradients
import wrong_results
import wrong_writes
from class_mutants import MUTANTS
from mutants import WRONG

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
    report = opsmith.check(wrong.operator, effort="quick", only=[wrong.check], **options)
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
    assert f'only=["{WRONG[name].check}"], seed=0, effort="quick"' in failure.replay
    with pytest.raises(AssertionError):
        run(failure.replay)


def test_what_may_kill_the_process_is_not_run_in_it() -> None:
    (failure,) = failures_of("kernel_raises", isolate=True)
    assert failure.replay is not None
    assert failure.replay.splitlines()[-1] == "assert report.passed_as_asked, report"


def test_a_class_is_applied() -> None:
    checked, samples = MUTANTS["writes_into_input"].build()
    (failure,) = opsmith.check(checked, samples=samples, only=["effects"], effort="quick").failures
    assert failure.replay is not None
    assert "Writes.apply(x)\nassert torch.equal(x, before), x" in failure.replay
