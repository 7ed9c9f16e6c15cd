"""Classes that compute their forward again in backward: what they keep, and which inputs are frozen."""

from __future__ import annotations

import planted_recomputing as corpus
import pytest
from corpora import rightly_named
from entries import PLANTED

import opsmith

ONLY = ["forward", "gradient", "effects", "memory"]
SAYS = {
    "sine_that_collects_in_what_was_saved": (
        "`.grad` of a saved tensor adds up the gradients of all backwards"
    ),
    "reversible_that_collects_in_its_weight": (
        "`.grad` of `ctx.weight` adds up the gradients of all backwards"
    ),
    "exponential_in_a_box": "in a reference cycle (`ctx.box` holds it)",
    "argument_in_a_closure": "stays on the context as `ctx.derivative` after the backward",
    "affine_with_its_input_frozen": "when `weight` and `bias` require a gradient",
}


@pytest.mark.every(8)
@pytest.mark.parametrize("name", SAYS)
def test_a_fault_of_what_is_kept_is_found_and_named(name: str) -> None:
    checked, samples = getattr(corpus, name)()
    report = opsmith.check(checked, samples=samples, effort="quick", only=ONLY)
    assert rightly_named(PLANTED[name], report), str(report)
    assert any(SAYS[name] in failure.message for failure in report.failures), str(report)


@pytest.mark.every(8)
@pytest.mark.parametrize(
    "build",
    [
        corpus.reversible_with_fresh_leaves,
        corpus.sine_with_a_box_of_its_own,
        corpus.affine_with_a_short_way_for_a_frozen_input,
    ],
)
def test_right_ones_pass(build: corpus.Any) -> None:
    checked, samples = build()
    report = opsmith.check(checked, samples=samples, effort="quick", only=ONLY)
    assert report.passed, str(report)


@pytest.mark.slow
def test_two_results_on_the_context_are_named() -> None:
    """A circle through two results leads through C++, and Python never frees it."""
    checked, samples = corpus.exponential_and_double_kept()
    (failure,) = opsmith.check(checked, samples=samples, effort="quick", only=["memory"]).failures
    assert "is kept for ever by `ctx.outputs`, in a reference cycle through C++" in failure.message
