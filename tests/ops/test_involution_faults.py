"""The property `cuda` finds what people get wrong in kernels such as those of involution."""

from __future__ import annotations

import sys

import pytest
from involution_faults import FAULTS, VALUES, Fault

import opsmith

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the emulation is built on Linux")


@pytest.mark.every(24)
@pytest.mark.parametrize(("number", "fault"), [*enumerate(FAULTS)], ids=[*map(str, FAULTS)])
def test_a_fault_is_found(number: int, fault: Fault) -> None:
    operator = fault.operator(number)
    report = opsmith.check(operator, only=["cuda"], samples=lambda: [fault.arguments()], effort="quick")
    causes = {each.cause for each in report.failures}
    assert (fault.shown in causes) if fault.shown else not causes, str(report)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_text_that_a_fault_changes_is_there(fault: Fault) -> None:
    kernel, header = fault.texts()
    assert fault.new in kernel + header


def test_most_are_found_and_the_others_have_a_reason() -> None:
    assert len(FAULTS) >= 30
    assert all(
        sum(each.kernel == kernel for each in FAULTS) >= 10 for kernel in {each.kernel for each in FAULTS}
    )
    missed = [each for each in FAULTS if not each.shown]
    assert len(missed) <= 4
    assert all(each.why for each in missed)
    assert 10 <= sum(each.shown == VALUES for each in FAULTS) <= len(FAULTS) // 2
