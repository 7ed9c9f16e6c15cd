"""The property `layouts` alone finds every operator that counts on contiguous memory, and says what of."""

import pytest
import wrong_gradients
import wrong_layouts
import wrong_surrogates
from mutants import WRONG

import opsmith

NAMES = [name for name, wrong in WRONG.items() if wrong.property == "layouts"]
MODULES = (wrong_gradients, wrong_layouts, wrong_surrogates)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_is_found_by_layouts_alone(name: str) -> None:
    wrong = WRONG[name]
    report = opsmith.check(wrong.operator, only=["layouts"])
    failures = {(failure.cause, failure.input): failure for failure in report.failures}
    assert (wrong.cause, wrong.input) in failures, str(report)
    assert wrong.says in failures[wrong.cause, wrong.input].message
    assert failures[wrong.cause, wrong.input].evidence["wrong for"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_its_script_fails_for_it_alone(name: str) -> None:
    report = opsmith.check(WRONG[name].operator, only=["layouts"])
    for failure in report.failures:
        assert failure.replay is not None
        with pytest.raises((AssertionError, RuntimeError)):
            exec(failure.replay, {})
        for_contiguous = "\n".join(
            f"{line.partition(' = ')[0]} = {line.partition(' = ')[0].removeprefix('odd_')}"
            if line.startswith("odd_")
            else line
            for line in failure.replay.splitlines()
        )
        assert for_contiguous != failure.replay
        exec(for_contiguous, {})


def test_there_are_enough() -> None:
    assert len(NAMES) >= 12
    assert all(module.__file__ for module in MODULES)
