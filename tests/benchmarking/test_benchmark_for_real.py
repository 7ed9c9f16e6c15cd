"""Real times of a real machine: repeats are silent, and a slowdown that was planted as work is flagged.

How noisy the machine is, nobody knows beforehand. A verdict says so itself: where it could not have seen a
slowdown of half, it is measured again, with more rounds, as the message says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from briefly import passed
from torch import Tensor

import opsmith
from opsmith.benchmarking import Benchmark, Verdict
from opsmith.benchmarking.effort import EFFORTS

PLANTED = 1.5
REPEATS = 5
TRIES = 6


@pytest.fixture(autouse=True)
def _small_machine() -> None:
    """The machine as it is, in the place of the one that is fast to measure."""


def work(x: Tensor, times: int) -> Tensor:
    """So many equal pieces of work."""
    for _ in range(times):
        x = torch.sin(x)
    return x


@opsmith.operator("for_real::slowed", shapes="x: N -> N")
def slowed(x: Tensor) -> Tensor:
    return work(x, 8)


slowed.samples(lambda make: [(make(5),)])
pieces = {"count": 8}
slowed.kernel(
    "cpu", lambda x: work(x, pieces["count"])[: x.shape[0]].clone() if pieces["count"] == 8 else _more(x)
)


def _more(x: Tensor) -> Tensor:
    """The same result with more pieces of work, whose results nobody needs."""
    work(x, pieces["count"] - 8)
    return work(x, 8).clone()


def measured(rounds: int) -> Benchmark:
    effort = replace(EFFORTS["quick"], least=rounds, most=rounds, turn_s=0.002, budget_s=1e9)
    return opsmith.benchmark(
        slowed,
        sizes={"N": [20_000, 100_000]},
        directions=["forward", "both"],
        threads=1,
        compiled=False,
        memory=False,
        effort=effort,
        report=passed(slowed),
    )


def until_it_could_be_seen(measure: Callable[[int], Verdict]) -> Verdict:
    """A verdict of enough rounds to see what is planted, where the machine lets one have it."""
    for attempt in range(TRIES):
        verdict = measure(15 * (1 + attempt))
        large = [each for each in verdict.changes if each.judged and "a call" not in each.case]
        if verdict.slower or max(each.detectable for each in large) < PLANTED:
            return verdict
    pytest.skip(f"this machine is too noisy to see a slowdown of {PLANTED} at all: {verdict}")


@pytest.mark.slow
def test_five_repeats_are_silent_and_a_planted_slowdown_is_flagged() -> None:
    before = measured(15)
    for _ in range(REPEATS):
        repeated = measured(15).against(before)
        assert repeated.comparable
        assert repeated.slower == (), str(repeated)
    pieces["count"] = int(8 * PLANTED) + 1  # of which the copy at the end is a part
    try:
        verdict = until_it_could_be_seen(lambda rounds: measured(rounds).against(before))
    finally:
        pieces["count"] = 8
    assert verdict.slower, str(verdict)
    assert {change.contender for change in verdict.slower} == {"native"}


@pytest.mark.slow
@pytest.mark.compile
def test_involution_is_measured_natively_beside_reference_and_compiled() -> None:
    sizes: Any = {"B": 1, "C": 32, "G": 2, "Kh Kw": 7, "padding": 3, "H W Ho Wo": 14}
    found = opsmith.benchmark(opsmith.ops.involution, sizes=sizes, effort="quick")
    case = found.cases[-1]
    assert [(each.name, each.left_out) for each in case.contenders] == [
        ("native", ""), ("reference", ""), ("compiled", ""),
    ]  # fmt: skip
    for direction in ("forward", "backward", "both"):
        for name in ("native", "reference", "compiled"):
            fraction = found.fraction(case, name, direction)
            assert fraction is not None
            assert fraction > 0
    pixels = 14 * 14
    forward = case.work_of("forward")
    assert forward is not None
    assert forward.flops == 2 * 32 * 49 * pixels
    assert forward.bytes == 4 * (2 * 32 * pixels + 2 * 49 * pixels)
