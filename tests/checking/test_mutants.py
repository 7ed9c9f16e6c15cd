"""Check rejects every wrong operator, by the right property and for the right cause, and passes every right one."""

import pytest
from right_operators import RIGHT
from wrong_operators import WRONG

import opsmith


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_operator_is_rejected(name: str) -> None:
    wrong = WRONG[name]
    report = opsmith.check(wrong.operator, skip=["integration"])
    found = [(failure.check, failure.cause, failure.input) for failure in report.failures]
    assert (wrong.check, wrong.cause, wrong.input) in found, str(report)
    assert not report.passed


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_operator_passes(name: str) -> None:
    report = opsmith.check(RIGHT[name], skip=["integration"])
    assert report.passed, str(report)
    assert not report.failures


@pytest.mark.compile
@pytest.mark.xdist_group("opcheck")
@pytest.mark.parametrize("name", RIGHT)
def test_opcheck_accepts_a_right_operator(name: str) -> None:
    report = opsmith.check(RIGHT[name], only=["integration"])
    assert report.passed_as_asked, str(report)
