"""Sizes that the reference refuses and a kernel in C++ takes are found, though they are not shown to it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.checking import Failure, Outcome
from opsmith.checking.processes.fork import in_child
from opsmith.checking.properties.kernels import sizes

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


@pytest.mark.slow
@pytest.mark.every(5)
@pytest.mark.parametrize("isolate", [False, True])
def test_sizes_that_do_not_fit_one_another(isolate: bool) -> None:
    of_x, of_w, of_both = failures(declare("forgets_both", ""), isolate=isolate)
    assert [(each.input, each.cause) for each in (of_x, of_w, of_both)] == [
        ("x", "not-refused"),
        ("w", "not-refused"),
        (None, "not-refused"),
    ]
    assert of_w.message.startswith(
        "the kernel computes a result of the shape [3, 5] for sample 0 (x [3, 5], w [6]; sample 0 with "
        "`w.shape[0]` = 6 instead of 5), but the reference refuses this sample (ValueError: expected as many "
        "weights as columns)"
    )
    assert "tensors. Refuse these sizes in `sizes`, by OPSMITH_CHECK" in of_w.message
    assert of_both.evidence["refused"] == "ValueError: expected an odd number of columns"
    assert "= 6 instead of 5" in of_both.evidence["sample"]
    assert str(of_w.where).startswith("<cpp of refused_sizes::forgets_both>:")
    assert 'only=["forward"]' in str(of_w.replay)


@pytest.mark.slow
def test_what_sizes_or_shapes_refuse_is_no_fault() -> None:
    assert failures(TESTED) == []
    by_letters = declare("has_letters", ODD, shapes="x: B N, w: N -> B N")
    assert failures(by_letters) == []


@pytest.mark.slow
def test_a_death_is_told_as_of_sizes_that_are_refused() -> None:
    (failure,) = failures(declare("dies", ODD + DEATH))
    assert (failure.property, failure.cause) == ("forward", "not-refused")
    assert failure.message.startswith("the process dies of SIGSEGV")
    assert failure.message.endswith("instead of 5), in or after a call that the reference refuses")
    assert failure.evidence["sample"].startswith("sample 0 (x [")
    assert failure.evidence["line"] == ODD + DEATH


def notes(monkeypatch: pytest.MonkeyPatch, answer: Any) -> tuple[str, ...]:
    def isolated(*_: Any, **__: Any) -> Outcome:
        if isinstance(answer, Exception):
            raise answer
        return Outcome("forward", "failed", failures=(answer,))

    monkeypatch.setattr(sizes, "run_isolated", isolated)
    (outcome,) = (
        each for each in opsmith.check(TESTED, only=["forward"], effort="quick").outcomes if each.notes
    )
    return outcome.notes


def test_where_no_process_can_be_forked_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    error = errors.UsageError("a check cannot be isolated once CUDA has been used", hint="none")
    assert notes(monkeypatch, error) == (
        "sizes that the reference refuses were not tried: a check cannot be isolated once CUDA has been used",
        "sizes of 0 were not tried in a process of their own: a check cannot be isolated once CUDA has been "
        "used",
    )


def test_what_takes_too_long_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Failure("forward", None, "raises", "it did not finish within 60 s", evidence={"limit": "60 s"})
    assert notes(monkeypatch, late) == (
        "not all sizes that the reference refuses were tried: it did not finish within 60 s",
        "not all sizes of 0 were tried: it did not finish within 60 s",
    )


@pytest.mark.slow
def test_numbers_that_the_reference_refuses_are_no_sizes() -> None:
    @opsmith.operator("refused_sizes::between", shapes="x: N, low: N, high: N -> N")
    def between(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
        if bool((low > high).any()):
            raise ValueError("expected no bound above the other")
        return torch.minimum(torch.maximum(x, low), high)

    between.fake(lambda x, low, high: torch.empty_like(x))
    between.samples(lambda make: [(make(n), low := make(n), low + make(n).abs()) for n in (16, 17)])
    between.kernel(
        "cpu",
        cpp="""
void between(View<const float, 1> x, View<const float, 1> low, View<const float, 1> high, View<float, 1> y) {
  for (int64_t i = 0; i < y.size(0); i++) y(i) = x(i) < low(i) ? low(i) : x(i) > high(i) ? high(i) : x(i);
}
""",
    )
    assert failures(between) == []


@pytest.mark.slow
def test_a_kernel_may_ask_for_several_threads() -> None:
    @opsmith.operator("refused_sizes::twice")
    def twice(x: Tensor) -> Tensor:
        if x.shape[0] % 2:
            raise ValueError("expected an even number")
        return 2 * x

    twice.samples(lambda make: [(make(4),), (make(6),)])
    twice.kernel(
        "cpu",
        cpp="""
void twice(View<const float, 1> x, View<float, 1> y) {
#pragma omp parallel for num_threads(2)
  for (int64_t i = 0; i < y.size(0); i++) y(i) = 2 * x(i);
}
Shape sizes(View<const float, 1> x) { return {x.size(0)}; }
""",
    )
    (failure,) = failures(twice)  # the threads of the parent are not there to be waited for
    assert (failure.cause, failure.input) == ("not-refused", "x")


def dies_at_four(name: str, tests: str) -> Any:
    """Its reference is asked of 6 numbers, and then ends the process where it is asked of 4."""

    @opsmith.operator(f"refused_sizes::{name}")
    def operator(x: Tensor) -> Tensor:
        if in_child() and x.shape[0] == 4:
            os._exit(3)
        if x.shape[0] % 2 == 0:
            raise ValueError("expected an odd number")
        return 2 * x

    operator.samples(lambda make: [(make(5),)])
    text = """
void NAME(View<const float, 1> x, View<float, 1> y) {
  for (int64_t i = 0; i < y.size(0); i++) y(i) = 2 * x(i);
}
Shape sizes(View<const float, 1> x) { TESTS return {x.size(0)}; }
"""
    return operator.kernel("cpu", cpp=text.replace("NAME", name).replace("TESTS", tests))


ENDS = (
    "the operator ends the process with status 3, instead of returning, on sample 0 (x [4]; sample "
    "0 with `x.shape[0]` = 4 instead of 5) in float32"
)


@pytest.mark.slow
def test_the_death_of_a_reference_is_none_of_the_kernel() -> None:
    tested = dies_at_four("dies_tested", 'OPSMITH_CHECK(x.size(0) % 2, "even");')
    report = opsmith.check(tested, only=["forward"], effort="quick")
    assert report.failures == ()
    words = "not all sizes that the reference refuses were tried: "
    assert report.outcomes[0].notes == (words + ENDS,)


@pytest.mark.slow
def test_a_death_after_what_the_kernel_took_may_be_of_its_doing() -> None:
    (failure,) = failures(dies_at_four("dies_untested", ""))
    assert failure.cause == "not-refused"
    assert failure.message == f"{ENDS}, in or after a call that the reference refuses"


@pytest.mark.slow
def test_of_what_does_not_compile_it_is_told_once() -> None:
    (failure,) = failures(declare("is_no_code", "int;;"))
    assert (failure.cause, str(failure.where).rpartition(":")[0]) == ("raises", __file__)
    assert "got: <cpp of refused_sizes::is_no_code>:7:3: " in failure.message


def test_without_a_compiler_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    (failure,) = failures(declare("has_no_compiler", ""))
    assert failure.cause == "not-exercised"
    assert "there is no C++ compiler" in failure.message


LOGGED = """
import opsmith, torch
from torch import Tensor

@opsmith.operator("refused_sizes::total")
def total(xs: list[Tensor]) -> Tensor:
    y = torch.zeros_like(xs[0])
    for x in xs:
        y = y + x
    return y

total.samples(lambda make: [([make(5), make(5)],), ([make(3)],)])
total.kernel("cpu", cpp='''
void total(List<View<const float, 1>> xs, View<float, 1> y) {
  for (int64_t i = 0; i < y.size(0); i++) {
    y(i) = 0;
    for (auto x : xs) y(i) += x(i);
  }
}
Shape sizes(List<View<const float, 1>> xs) {
  for (auto x : xs) OPSMITH_CHECK(x.size(0) == xs[0].size(0), "they differ");
  return {xs[0].size(0)};
}
''')
print(opsmith.check(total, effort="quick").passed)
"""


@pytest.mark.slow
def test_what_torch_logs_of_refused_sizes_is_not_shown(tmp_path: Path) -> None:
    """torch logs each error of an operation on fake tensors, with a traceback of forty lines."""
    (tmp_path / "logged.py").write_text(LOGGED)
    done = subprocess.run([sys.executable, "logged.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\n", "")
