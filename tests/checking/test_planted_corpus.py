"""Check finds every planted fault, names nine of ten rightly, and lets every right operator pass.

Before a push, one fault of each cause and a sixth of the right operators run at one seed of `quick`. All of
both corpora at two seeds of `quick`, the second of which is 1 and 2 in turn, and at one of the default effort
are slow.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from corpora import COMPILED, Corpus, corpora, corpus_of, message, rightly_named
from entries import PLANTED, SOUND

import opsmith
from opsmith.checking.causes import CAUSES

CORPORA = corpora()
RUNS = [*((seed, "quick") for seed in range(3)), (1, "default")]
"""Seeds and efforts; in all but the first, every case is slow."""
WARNINGS = {
    # Wrong at special values alone.
    "binary_cross_entropy_that_overflows",
    "exp_with_truncated_gradient",
    "h_sinc_at_zero",
    "log_sigmoid_of_large_numbers",
    "logsumexp_whose_backward_overflows",
    # Wrong in a second order that the class does not promise.
    "cross_entropy_detached",
    "h_gelu_with_a_stored_slope",
    "h_product_that_detaches_one",
    "layer_norm_of_saved_statistics",
    "potential_with_a_force_without_graph",
    "similarity_of_detached_norms",
    "sort_that_detaches",
    "swish_keeps_sigmoid_on_ctx",
    # Its backward leaves a gradient out in every return statement.
    "h_soft_quantiser_with_a_fixed_step",
    "linear_forgets_bias",
    "snake_with_frozen_frequency",
    # Loud, and the damage is done.
    "in_place_rope_that_looks_at_k_late",
    # Computed in float32 where float64 comes in.
    "gelu_backward_in_float32",
    "h_gaussian_with_a_constant_in_float32",
}
"""Planted faults that are warnings, by the table of severities."""
NAMED = 0.9
"""The share of faults whose cause must be the right one."""


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    """Some faults leave the process changed, which is what is wrong with them: the next is not to see it."""
    deterministic, threads = torch.backends.cudnn.deterministic, torch.get_num_threads()
    with torch.random.fork_rng():
        yield
    torch.backends.cudnn.deterministic = deterministic
    torch.set_num_threads(threads)


@cache
def report_on(name: str, seed: int, effort: str) -> opsmith.Report:
    """The report on an entry, with its compile checks left out."""
    operator, samples = (PLANTED.get(name) or SOUND[name]).build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what an operator warns of is no fault of the test
        return opsmith.check(operator, samples=samples, seed=seed, effort=effort, skip=COMPILED)  # type: ignore[arg-type]


FIRST_OF_CAUSE = [*{entry.cause: name for name, entry in reversed(PLANTED.items())}.values()]
"""The first fault of each cause."""
SHORT = FIRST_OF_CAUSE[::4]
"""Of those, the ones that are not slow."""


def group(corpus: str, seed: int, effort: str) -> pytest.MarkDecorator:
    """A run of a corpus stays in one process, which keeps its reports."""
    return pytest.mark.xdist_group(f"{corpus}-{effort}-{seed}")


def cases(values: Iterable[Any], corpus: Callable[[Any], str], short: Collection[Any]) -> list[Any]:
    """Each value in its runs; of the first run, `short` alone is not slow."""
    return [
        pytest.param(
            value,
            seed,
            effort,
            id=str(value) if run == 0 else f"{value}-{effort}-{seed}",
            marks=[
                group(corpus(value), seed, effort),
                *([pytest.mark.slow] if run or value not in short else []),
            ],
        )
        for run, (seed, effort) in enumerate(RUNS)
        for at, value in enumerate(values)
        if run not in (1, 2) or at % 2 == run % 2
    ]


FAULTS = cases(PLANTED, lambda name: corpus_of(PLANTED[name]), SHORT)
RIGHT = cases(SOUND, lambda name: corpus_of(SOUND[name]), [*SOUND][::24])


@pytest.mark.every(8)
@pytest.mark.parametrize(("name", "seed", "effort"), FAULTS)
def test_a_planted_fault_is_found(name: str, seed: int, effort: str) -> None:
    report = report_on(name, seed, effort)
    assert report.warnings if name in WARNINGS else report.errors, str(report)


@pytest.mark.every(8)
@pytest.mark.parametrize(("name", "seed", "effort"), RIGHT)
def test_a_right_operator_passes(name: str, seed: int, effort: str) -> None:
    report = report_on(name, seed, effort)
    assert report.passed, str(report)
    assert not report.warnings, str(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("corpus", "seed", "effort"),
    [
        pytest.param(corpus, *run, id=f"{corpus}-{run[1]}-{run[0]}", marks=group(str(corpus), *run))
        for run in RUNS
        for corpus in CORPORA
    ],
)
def test_most_faults_are_named_rightly(corpus: Corpus, seed: int, effort: str) -> None:
    ran = {case.values for case in FAULTS}
    names = [name for name in corpus.planted if (name, seed, effort) in ran]
    assert_named({name: report_on(name, seed, effort) for name in names}, f"{corpus}")


@pytest.mark.slow
@pytest.mark.every(8)
@pytest.mark.parametrize(
    "corpus", [pytest.param(each, id=str(each), marks=group(str(each), *RUNS[0])) for each in CORPORA]
)
def test_the_short_list_is_named_rightly(corpus: Corpus) -> None:
    assert_named({name: report_on(name, *RUNS[0]) for name in corpus.planted if name in SHORT}, f"{corpus}")


def assert_named(reports: Mapping[str, opsmith.Report], what: str) -> None:
    wrong = [name for name, report in reports.items() if not rightly_named(PLANTED[name], report)]
    share = 1 - len(wrong) / len(reports)
    table = "\n".join(message(PLANTED[name], reports[name]) for name in wrong)
    print(f"{what}: {share:.0%} of {len(reports)} named rightly; not:\n{table}")  # noqa: T201
    assert share >= NAMED


def test_the_corpora_are_large_enough() -> None:
    assert {corpus_of(entry) for entry in (*PLANTED.values(), *SOUND.values())} == {*map(str, CORPORA)}
    assert len(PLANTED) >= 80
    assert len({entry.base for entry in PLANTED.values()}) >= 15
    assert len(SOUND) >= 40
    closed = set(CAUSES)
    assert {cause for entry in PLANTED.values() for cause in (entry.cause, *entry.also)} <= closed
