"""Check finds every planted fault, names nine of ten rightly, and lets every right operator pass."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from corpora import Corpus, corpora, rightly_named, told
from corpus import PLANTED, SOUND

import opsmith

CORPORA = corpora()
SEEDS = range(1, 6)
NAMED = 0.9
"""The share of faults whose cause must be the right one."""

DUE = {
    "exp_with_truncated_gradient": "missed: larger numbers than the samples have are not tried yet",
    "swiglu_in_whole_blocks": "missed: other sizes than the samples have are not tried yet",
    "leaky_relu_with_kink": "false alarm: kinks are not told yet",
    "hardtanh_on_its_bounds": "false alarm: kinks are not told yet",
}
"""What check does not do yet."""


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
        return opsmith.check(operator, samples=samples, seed=seed, effort=effort, skip=["integration"])  # type: ignore[arg-type]


def marked(names: Iterable[str]) -> list[Any]:
    """The names; those of DUE are expected to fail, and are to be struck from it when they pass."""
    return [
        pytest.param(name, marks=pytest.mark.xfail(reason=DUE[name], strict=True)) if name in DUE else name
        for name in names
    ]


@pytest.mark.xdist_group("corpus")
@pytest.mark.parametrize("name", marked(PLANTED))
def test_a_planted_fault_is_found(name: str) -> None:
    report = report_on(name, 0, "quick")
    assert report.failures, str(report)


@pytest.mark.xdist_group("corpus")
@pytest.mark.parametrize("name", marked(SOUND))
def test_a_right_operator_passes(name: str) -> None:
    report = report_on(name, 0, "quick")
    assert report.passed, str(report)


@pytest.mark.xfail(reason="several causes are not decided yet", strict=True)
@pytest.mark.xdist_group("corpus")
@pytest.mark.parametrize("corpus", CORPORA, ids=str)
def test_most_faults_are_named_rightly(corpus: Corpus) -> None:
    assert_named(corpus, 0, "quick")


@pytest.mark.slow
@pytest.mark.xdist_group("corpus")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("corpus", CORPORA, ids=str)
def test_other_seeds_find_and_name_as_much(corpus: Corpus, seed: int) -> None:
    missed = [name for name in corpus.planted if not report_on(name, seed, "default").failures]
    assert not missed
    alarms = [name for name in corpus.sound if not report_on(name, seed, "default").passed]
    assert not alarms
    assert_named(corpus, seed, "default")


def assert_named(corpus: Corpus, seed: int, effort: str) -> None:
    reports = {name: report_on(name, seed, effort) for name in corpus.planted}
    wrong = [name for name, report in reports.items() if not rightly_named(PLANTED[name], report)]
    share = 1 - len(wrong) / len(reports)
    table = "\n".join(told(PLANTED[name], reports[name]) for name in wrong)
    assert share >= NAMED, f"{share:.0%} of `{corpus}` named rightly; not:\n{table}"
