"""A benchmark beside an earlier one: a planted slowdown is flagged, and noise is not. All times are drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planted import ENVIRONMENT, planted

from opsmith import errors
from opsmith.benchmarking import Benchmark
from opsmith.benchmarking.result import CONTROLS, BenchmarkCase
from opsmith.benchmarking.verdict import judge

REPEATS = 60


def one_row(seed: int) -> BenchmarkCase:
    """One size, forward alone."""
    return planted(seed, sizes=(1024,), directions=("forward",)).cases[0]


@pytest.mark.every(8)
@pytest.mark.parametrize("noise", [0.01, 0.03, 0.08])
def test_a_planted_slowdown_of_half_is_flagged(noise: float) -> None:
    missed = 0
    for seed in range(REPEATS):
        before, now = planted(seed, noise=noise), planted(seed + 1000, noise=noise, slowdown=1.5)
        verdict = now.against(before)
        assert all(change.contender == "native" for change in verdict.slower)
        missed += not verdict.slower
    assert missed == 0


@pytest.mark.every(8)
@pytest.mark.parametrize("noise", [0.01, 0.03, 0.08, 0.3, 1.0])
def test_repeats_without_one_are_silent(noise: float) -> None:
    flagged = 0
    for seed in range(REPEATS):
        verdict = planted(seed + 1000, noise=noise).against(planted(seed, noise=noise))
        assert verdict.comparable
        flagged += bool(verdict.slower)
    assert flagged == 0


def test_five_repeats_are_silent_and_the_sixth_with_a_slowdown_is_not() -> None:
    before = planted(0)
    repeats = [planted(seed).against(before) for seed in range(1, 6)]
    assert [verdict.passed for verdict in repeats] == [True] * 5
    slower = planted(6, slowdown=1.5).against(before)
    assert not slower.passed
    assert len(slower.slower) == 9
    assert str(slower).splitlines()[0] == "demo::op: SLOWER in 9 of 9 rows"


def test_one_direction_alone_is_named() -> None:
    slower = planted(6, slowdown=1.5, slow_directions=("backward",)).against(planted(0))
    assert {change.direction for change in slower.slower} == {"backward"}
    assert len(slower.slower) == 3


@pytest.mark.every(5)
@pytest.mark.parametrize("drift", [0.5, 0.7, 1.5, 3.0])
def test_a_machine_that_changed_its_pace_is_no_slowdown(drift: float) -> None:
    flagged = sum(
        bool(planted(seed + 1000, drift=drift).against(planted(seed)).slower) for seed in range(REPEATS)
    )
    assert flagged == 0


def test_a_slowdown_on_a_machine_that_became_faster_is_unclear_and_on_one_a_little_slower_is_flagged() -> (
    None
):
    faster = planted(1, drift=0.6, slowdown=1.5).against(planted(0))
    assert not faster.slower
    assert planted(1, drift=1.15, slowdown=1.5).against(planted(0)).slower


def test_only_the_operators_own_rows_are_judged() -> None:
    verdict = planted(1, slowdown=3.0, of="compiled", source="another").against(planted(0))
    assert verdict.passed
    changes = {change.contender: change for change in verdict.changes}
    assert (changes["compiled"].kind, changes["compiled"].judged) == ("slower", False)


def test_what_slows_the_unchanged_reference_down_as_much_is_the_machine_and_an_edited_one_tells_nothing() -> (
    None
):
    def both(seed: int, **options: Any) -> Any:
        made = planted(seed, slowdown=1.6, **options)
        slow = {each.key: each for each in planted(seed, slowdown=1.6, of="reference", **options).cases}
        cases = []
        for case in made.cases:
            references = [each for each in slow[case.key].timings if each.contender == "reference"]
            others = [each for each in case.timings if each.contender != "reference"]
            cases.append(replace(case, timings=(*others, *references)))
        return replace(made, cases=tuple(cases))

    assert not both(1).against(planted(0)).slower
    assert both(1, source="another").against(planted(0)).slower


def test_a_speedup_is_told_and_passes() -> None:
    verdict = planted(1, slowdown=0.5).against(planted(0))
    assert verdict.passed
    assert {change.kind for change in verdict.changes if change.judged} == {"faster"}
    assert "faster" in str(verdict)


def test_tolerance_is_by_how_much_a_row_must_be_slower() -> None:
    before, now = planted(0, noise=0.001), planted(1, noise=0.001, slowdown=1.3)
    assert now.against(before).slower
    assert not now.against(before, tolerance=0.5).slower


def test_the_smallest_slowdown_that_would_be_seen_is_told_and_grows_with_noise() -> None:
    def most(noise: float) -> float:
        verdict = planted(1, noise=noise).against(planted(0, noise=noise))
        return max(change.detectable for change in verdict.changes if change.judged)

    assert 1.1 < most(0.001) < 1.2 < most(0.05) < 1.5 < most(0.5)
    quiet, loud = (planted(1, noise=each).against(planted(0, noise=each)) for each in (0.01, 1.0))
    assert "not slower; a slowdown by a factor of " in str(quiet).splitlines()[0]
    assert str(loud).startswith("demo::op: no slowdown seen, but the noise is large: a slowdown ")


def test_what_would_be_seen_is_seen_and_nothing_below_it() -> None:
    for seed in range(REPEATS):
        before, now = (
            {each.contender: each.seconds for each in one_row(number).timings}
            for number in (seed, seed + 1000)
        )
        controls = [(before[name], now[name]) for name in CONTROLS]
        told = judge(before["native"], now["native"], controls, scatter=0.01)
        for times, seen in ((1.001, True), (0.999, False)):
            by = times * told.detectable / told.ratio
            again = judge(before["native"], [each * by for each in now["native"]], controls, scatter=0.01)
            assert (again.kind == "slower") is seen
            assert again.detectable == pytest.approx(told.detectable)


def test_among_much_noise_a_slowdown_is_unclear_and_says_what_to_do() -> None:
    verdict = planted(5, noise=1.0, slowdown=1.5).against(planted(0, noise=1.0))
    assert not verdict.slower
    assert "unclear: noise may explain it; measure both again without other programs" in str(verdict)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"environment": ENVIRONMENT | {"torch": "2.14.0"}}, "torch was 2.13.0, and is 2.14.0"),
        ({"environment": ENVIRONMENT | {"processor": "other"}}, "processor was a processor, and is other"),
        ({"environment": ENVIRONMENT | {"machine": "arm64"}}, "machine was x86_64, and is arm64"),
        ({"environment": ENVIRONMENT | {"devices": "cpu, cuda"}}, "devices was cpu, and is cpu, cuda"),
        ({"threads": 8}, "threads were 2, and are 8"),
    ],
    ids=["torch", "processor", "machine", "devices", "threads"],
)
def test_runs_on_something_else_are_not_compared_strictly(changed: Any, says: str) -> None:
    verdict = planted(1, slowdown=9.0, **changed).against(planted(0))
    assert not verdict.comparable
    assert not verdict.passed
    assert verdict.slower == ()
    assert str(verdict).splitlines()[0] == f"demo::op: NOT COMPARABLE: {says}"
    assert all(change.ratio > 5 for change in verdict.changes if change.judged)  # told all the same


def test_sizes_that_only_one_run_has_are_told() -> None:
    verdict = planted(1, sizes=(1024, 2048)).against(planted(0, sizes=(1024, 4096)))
    assert verdict.comparable
    assert verdict.missing == ("N=2048 (float32, cpu)", "N=4096 (float32, cpu)")
    assert "only in one of the runs: N=2048 (float32, cpu)" in str(verdict)
    nothing = planted(1, sizes=(2048,)).against(planted(0, sizes=(4096,)))
    assert not nothing.comparable
    assert "NOT COMPARABLE: no row of the operator is in both runs" in str(nothing)


def test_sizes_that_look_alike_are_compared_in_their_order() -> None:
    def twice(seed: int, slowdown: float) -> Benchmark:
        first, second = planted(seed, sizes=(1024,)), planted(seed + 500, sizes=(1024,), slowdown=slowdown)
        relabelled = [
            replace(each.cases[0], label=f"N=1024 ({at})") for at, each in enumerate((first, second))
        ]
        return replace(first, cases=tuple(relabelled))

    verdict = twice(1, 1.8).against(twice(0, 1.0))
    assert verdict.missing == ()
    assert {change.case for change in verdict.slower} == {"N=1024 (1) (float32, cpu)"}
    assert twice(1, 1.8).against(twice(2, 1.8)).passed


def test_a_baseline_whose_code_may_have_changed_is_no_measure_of_noise() -> None:
    def beside_a_baseline(seed: int, slowdowns: tuple[float, ...], **options: Any) -> Benchmark:
        made = planted(seed, **options)
        cases = []
        for case, slowdown in zip(made.cases, slowdowns, strict=True):
            slow = [
                replace(each, seconds=tuple(slowdown * one for one in each.seconds)) for each in case.timings
            ]
            baselines = [replace(each, contender=f"baseline{at}") for each in slow for at in range(2)]
            cases.append(replace(case, timings=(*case.timings, *baselines)))
        return replace(made, cases=tuple(cases))

    before = beside_a_baseline(0, (1.0, 1.0, 1.0))
    now = beside_a_baseline(1, (0.1, 1.0, 8.0), slowdown=1.5)
    assert len(now.against(before).slower) == 9


def test_a_contender_that_only_one_run_has_is_told() -> None:
    now = planted(1, sizes=(1024,))
    case = now.cases[0]
    fewer = replace(case, timings=tuple(each for each in case.timings if each.contender != "compiled"))
    assert replace(now, cases=(fewer,)).against(planted(0, sizes=(1024,))).missing == (
        "compiled at N=1024 (float32, cpu)",
    )


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(errors.UsageError, match="the two benchmarks are of different operators") as raised:
        planted(1).against(planted(0, operator="demo::another"))
    assert raised.value.got == "one of `demo::another`"
    with pytest.raises(errors.UsageError, match="a benchmark is compared with a benchmark"):
        planted(1).against({"schema": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("tolerance", [-0.1, float("nan"), float("inf"), "a tenth", True])
def test_a_tolerance_that_is_none_is_refused(tolerance: Any) -> None:
    with pytest.raises(errors.UsageError, match="the tolerance must be a fraction"):
        planted(1).against(planted(0), tolerance=tolerance)
