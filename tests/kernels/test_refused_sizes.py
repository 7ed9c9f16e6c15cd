"""Sizes that the reference refuses and a kernel in C++ takes are found, though they are not shown to it."""

from __future__ import annotations

import os
from typing import Any

import pytest
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.checking import Failure, Outcome, refused_sizes

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is isolated where there is no fork")

KERNEL = """
void NAME(View<const float, 2> x, View<const float, 1> w, View<float, 2> y) {
  for (int64_t i = 0; i < y.size(0); i++)
    for (int64_t j = 0; j < y.size(1); j++) y(i, j) = x(i, j) * w(j);
}
Shape sizes(View<const float, 2> x, View<const float, 1> w) {
  TESTS
  return {x.size(0), x.size(1)};
}
"""
ODD = 'OPSMITH_CHECK(x.size(1) % 2, "an even number");'
EQUAL = 'OPSMITH_CHECK(x.size(1) == w.size(0), "they differ");'
DEATH = "if (x.size(1) != w.size(0)) *(volatile int*)nullptr = 0;  // fault"


def weighed(x: Tensor, w: Tensor) -> Tensor:
    if x.shape[1] % 2 == 0:
        raise ValueError("expected an odd number of columns")
    if x.shape[1] != w.shape[0]:
        raise ValueError("expected as many weights as columns")
    return x * w


def declare(name: str, tests: str, shapes: str | None = None) -> Any:
    operator = opsmith.operator(f"refused_sizes::{name}", shapes=shapes)(weighed)
    operator.samples(lambda make: [(make(3, 5), make(5)), (make(2, 7), make(7))])
    return operator.kernel("cpu", cpp=KERNEL.replace("NAME", name).replace("TESTS", tests))


TESTED = declare("tests_both", ODD + EQUAL)


def failures(operator: Any, **options: Any) -> list[Failure]:
    report = opsmith.check(operator, only=["forward"], effort="quick", **options)
    return [*report.failures]


@pytest.mark.parametrize("isolate", [False, True])
def test_sizes_that_do_not_fit_one_another(isolate: bool) -> None:
    of_x, of_w, of_both = failures(declare("forgets_both", ""), isolate=isolate)
    assert [(each.input, each.cause) for each in (of_x, of_w, of_both)] == [
        ("x", "not-refused"),
        ("w", "not-refused"),
        (None, "not-refused"),
    ]
    assert of_w.message.startswith(
        "it computes a result of the shape [3, 5] for sample 0 (x [3, 5], w [6]; sample 0 with `w.shape[0]` "
        "at 6 where it had 5), which the reference refuses (ValueError: expected as many weights as columns)"
    )
    assert "refuse them in `sizes`, by OPSMITH_CHECK" in of_w.message
    assert of_both.evidence["refused"] == "ValueError: expected an odd number of columns"
    assert "at 6 where it had 5" in of_both.evidence["sample"]
    assert str(of_w.where).startswith("<cpp of refused_sizes::forgets_both>:")
    assert 'only=["forward"]' in str(of_w.replay)


def test_what_sizes_or_shapes_refuse_is_no_fault() -> None:
    assert failures(TESTED) == []
    by_letters = declare("has_letters", ODD, shapes="x: B N, w: N -> B N")
    assert failures(by_letters) == []


def test_a_death_is_told_as_of_sizes_that_are_refused() -> None:
    (failure,) = failures(declare("dies", ODD + DEATH))
    assert (failure.check, failure.cause) == ("forward", "not-refused")
    assert failure.message.startswith("the process dies of SIGSEGV")
    assert failure.message.endswith("where it had 5), which the reference refuses")
    assert failure.evidence["line"] == ODD + DEATH


def notes(monkeypatch: pytest.MonkeyPatch, answer: Any) -> tuple[str, ...]:
    def isolated(*_: Any, **__: Any) -> Outcome:
        if isinstance(answer, Exception):
            raise answer
        return Outcome("forward", "failed", failures=(answer,))

    monkeypatch.setattr(refused_sizes, "isolated", isolated)
    (outcome,) = (
        each for each in opsmith.check(TESTED, only=["forward"], effort="quick").outcomes if each.notes
    )
    return outcome.notes


def test_where_no_process_can_be_forked_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    error = errors.UsageError("a check cannot be isolated once CUDA has been used", mend="none")
    (note,) = notes(monkeypatch, error)
    words = "what a kernel does with sizes that the reference refuses was not tried: "
    assert note == words + "a check cannot be isolated once CUDA has been used"


def test_what_takes_too_long_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Failure("forward", None, "raises", "it did not finish within 60 s", evidence={"limit": "60 s"})
    assert notes(monkeypatch, late) == (
        "with sizes that the reference refuses, it did not finish within 60 s",
    )


def test_of_what_does_not_compile_it_is_told_once() -> None:
    (failure,) = failures(declare("is_no_code", "int;;"))
    assert (failure.cause, str(failure.where).partition(":")[0]) == ("raises", "<cpp of refused_sizes")


def test_without_a_compiler_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    (failure,) = failures(declare("has_no_compiler", ""))
    assert failure.cause == "not-exercised"
    assert "there is no C++ compiler" in failure.message
