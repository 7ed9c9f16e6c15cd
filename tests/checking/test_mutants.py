"""Check rejects every wrong operator by the right property, for the right cause, and for nothing else."""

from dataclasses import replace

import mutants
import pytest
import wrong_batching
import wrong_effects
import wrong_gradients
import wrong_layouts
import wrong_results
import wrong_surrogates
from faults_of_torch import marked
from mutants import WRONG, Wrong
from right_operators import RIGHT

import opsmith
from opsmith.core.effort_level import Level

FILES = {
    str(module.__file__)
    for module in (
        mutants,
        wrong_batching,
        wrong_effects,
        wrong_gradients,
        wrong_layouts,
        wrong_results,
        wrong_surrogates,
    )
}


def others(wrong: Wrong, report: opsmith.Report) -> set[tuple[str, str, str | None]]:
    """Root causes in a report other than the planted fault: another cause, or argument."""
    return {
        (failure.property, failure.cause, failure.input)
        for failure in report.failures
        if failure.follows is None
        and (failure.cause != wrong.cause or (wrong.input and failure.input and wrong.input != failure.input))
    }


def report_on(name: str) -> opsmith.Report:
    effort: Level = (
        "default" if WRONG[name].property == "layouts" else "quick"
    )  # which tries some layouts alone
    return opsmith.check(WRONG[name].operator, skip=["integration"], effort=effort)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_operator_is_rejected(name: str) -> None:
    wrong = WRONG[name]
    report = report_on(name)
    found = {(failure.property, failure.cause, failure.input): failure for failure in report.failures}
    assert (wrong.property, wrong.cause, wrong.input) in found, str(report)
    failure = found[wrong.property, wrong.cause, wrong.input]
    assert wrong.says in failure.message
    assert failure.follows in (None, "gradient")
    assert failure.where is not None
    assert failure.where.rpartition(":")[0] in FILES
    assert not replace(report, strict=True).passed or failure.severity == "limit"
    assert others(wrong, report) == set(), str(report)


def test_two_faults_are_no_single_one() -> None:
    """The test that a mutant has one fault alone finds a second one, of another argument or kind."""
    both = mutants.linear("two_faults").gradients(
        weight=lambda grad, x: -(grad.mT @ x), bias=lambda grad: -grad.sum(0)
    )
    report = opsmith.check(both, only=["gradient"], effort="quick")
    assert others(WRONG["sign"], report) == {("gradient", "sign", "bias")}
    assert others(WRONG["mean_over_the_batch"], report) == {
        ("gradient", "sign", "bias"),
        ("gradient", "sign", "weight"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_operator_passes(name: str) -> None:
    report = opsmith.check(RIGHT[name], skip=["integration"], effort="quick")
    assert report.passed, str(report)
    assert not report.failures


@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "test", "cause", "says"),
    marked(
        [
            (
                "kernel_writes_into_its_input",
                "schema",
                "mutates-input",
                "Argument x is not defined as mutable but was mutated",
            ),
            (
                "graph_cut",
                "aot_dispatch_dynamic",
                "raises",
                "results and gradients are the same when traced with dynamic",
            ),
        ]
    ),
)
def test_opcheck_rejects_a_wrong_operator(name: str, test: str, cause: str, says: str) -> None:
    (failure,) = opsmith.check(WRONG[name].operator, only=["opcheck"]).failures
    assert (failure.property, failure.cause) == ("opcheck", cause)
    assert failure.message.startswith(f"opcheck's test_{test} fails (")
    assert says in failure.message


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("name", marked(RIGHT))
def test_opcheck_accepts_a_right_operator(name: str) -> None:
    report = opsmith.check(RIGHT[name], only=["integration"])
    assert report.passed_as_asked, str(report)
