"""Check finds every planted fault, names nine of ten rightly, and lets every right operator pass.

One seed of `quick` runs on all of both corpora. Five more, and one of the default effort, are slow.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from corpora import COMPILED, Corpus, corpora, corpus_of, rightly_named, told
from entries import PLANTED, SOUND

import opsmith
from opsmith.checking.causes import CAUSES

CORPORA = corpora()
RUNS = [*((seed, "quick") for seed in range(1, 6)), (1, "default")]
"""Beside seed 0 at `quick`: five other seeds, and more effort."""
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
    """What check says of an entry, with its compile checks left out."""
    operator, samples = (PLANTED.get(name) or SOUND[name]).build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what an operator warns of is no fault of the test
        return opsmith.check(operator, samples=samples, seed=seed, effort=effort, skip=COMPILED)  # type: ignore[arg-type]


def grouped(names: Iterable[str]) -> list[Any]:
    """The names; a corpus runs in one process, where the test of its causes finds the reports."""
    entries = {name: PLANTED.get(name) or SOUND[name] for name in names}
    return [
        pytest.param(name, marks=pytest.mark.xdist_group(f"corpus-{corpus_of(entry)}"))
        for name, entry in entries.items()
    ]


@pytest.mark.parametrize("name", grouped(PLANTED))
def test_a_planted_fault_is_found(name: str) -> None:
    report = report_on(name, 0, "quick")
    assert report.failures, str(report)


@pytest.mark.parametrize("name", grouped(SOUND))
def test_a_right_operator_passes(name: str) -> None:
    report = report_on(name, 0, "quick")
    assert report.passed, str(report)


@pytest.mark.parametrize(
    "corpus",
    [pytest.param(each, id=str(each), marks=pytest.mark.xdist_group(f"corpus-{each}")) for each in CORPORA],
)
def test_most_faults_are_named_rightly(corpus: Corpus) -> None:
    assert_named(corpus, 0, "quick")


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "effort"), RUNS)
@pytest.mark.parametrize("corpus", CORPORA, ids=str)
def test_other_seeds_and_more_effort_find_and_name_as_much(corpus: Corpus, seed: int, effort: str) -> None:
    missed = [name for name in corpus.planted if not report_on(name, seed, effort).failures]
    alarms = [name for name in corpus.sound if not report_on(name, seed, effort).passed]
    assert not missed
    assert not alarms
    assert_named(corpus, seed, effort)


def assert_named(corpus: Corpus, seed: int, effort: str) -> None:
    """Hold the share that is named rightly to NAMED, and print what is not."""
    reports = {name: report_on(name, seed, effort) for name in corpus.planted}
    wrong = [name for name, report in reports.items() if not rightly_named(PLANTED[name], report)]
    share = 1 - len(wrong) / len(reports)
    table = "\n".join(told(PLANTED[name], reports[name]) for name in wrong)
    print(f"{corpus}: {share:.0%} of {len(reports)} named rightly; not:\n{table}")  # noqa: T201
    assert share >= NAMED


def test_the_corpora_are_large_enough() -> None:
    assert {corpus_of(entry) for entry in (*PLANTED.values(), *SOUND.values())} == {*map(str, CORPORA)}
    assert len(PLANTED) >= 80
    assert len({entry.base for entry in PLANTED.values()}) >= 15
    assert len(SOUND) >= 40
    closed = set(CAUSES)
    assert {cause for entry in PLANTED.values() for cause in (entry.cause, *entry.also)} <= closed
