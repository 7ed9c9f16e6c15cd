"""Medians, quartiles and the interval of a ratio, as functions of numbers alone."""

from __future__ import annotations

import random
import statistics

import pytest

from opsmith.benchmarking.timing import ratio, spread


def test_an_outlier_moves_neither_median_nor_quartiles() -> None:
    quiet = spread([1.0, 1.01, 1.02, 1.03, 1.04])
    loud = spread([1.0, 1.01, 1.02, 1.03, 50.0])
    assert (quiet.median, quiet.low, quiet.high, quiet.least) == (
        loud.median,
        loud.low,
        loud.high,
        loud.least,
    )
    assert quiet.relative == pytest.approx(0.01 / 1.02)


def test_one_number_has_no_spread() -> None:
    one = spread([3.0])
    assert (one.median, one.low, one.high, one.least, one.count, one.relative) == (3.0, 3.0, 3.0, 3.0, 1, 0.0)


def test_a_round_that_was_slow_for_both_does_not_move_the_ratio() -> None:
    found = ratio([2.0, 2.0, 40.0, 2.0, 2.0, 2.0], [1.0, 1.0, 20.0, 1.0, 1.0, 1.0])
    assert (found.median, found.low, found.high) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize(("count", "skipped"), [(2, 0), (5, 0), (6, 0), (9, 1), (11, 1), (12, 2), (31, 9)])
def test_the_interval_leaves_out_as_many_as_95_percent_let_it(count: int, skipped: int) -> None:
    """The table of binomial intervals for a median, as W. J. Conover has it."""
    found = ratio([float(each) for each in range(1, count + 1)], [1.0] * count)
    assert (found.low, found.high) == (1 + skipped, count - skipped)
    assert found.sure >= 0.95 or skipped == 0


@pytest.mark.parametrize("count", [7, 11, 31])
def test_the_interval_holds_the_true_ratio_as_often_as_it_says(count: int) -> None:
    draw = random.Random(count)
    held, tries = 0, 2000
    for _ in range(tries):
        found = ratio([2.0 * draw.lognormvariate(0, 0.3) for _ in range(count)], [1.0] * count)
        held += found.low <= 2.0 <= found.high
    assert found.sure - 3 * (0.05 * 0.95 / tries) ** 0.5 <= held / tries <= found.sure + 0.02


def test_quartiles_are_those_of_the_standard_library() -> None:
    numbers = [5.0, 1.0, 4.0, 2.0, 3.0, 9.0]
    found = spread(numbers)
    assert [found.low, found.median, found.high] == statistics.quantiles(numbers, n=4, method="inclusive")
