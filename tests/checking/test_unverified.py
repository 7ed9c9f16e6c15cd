"""A kernel that did not run is unverified, and the verdict says so: `passed` covers what ran."""

from __future__ import annotations

import json
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith.checking import Outcome, Report
from opsmith.checking.accepting import with_baseline
from opsmith.checking.output.html import page
from opsmith.kernels.triton.interpreter import missing_interpreter
from opsmith.testing import assert_correct

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: its kernels run")


def cubed(name: str) -> Any:
    @opsmith.operator(f"unverified::{name}")
    def cubed(x: Tensor) -> Tensor:
        return x**3

    cubed.samples(lambda make: [(make(3),)])
    return cubed


@pytest.mark.slow
@NO_GPU
def test_kernels_for_a_gpu_that_is_not_here_are_unverified() -> None:
    operator = cubed("cuda")

    @operator.kernel("cuda")
    def in_python(x: Tensor) -> Tensor:
        return x * 0

    report = opsmith.check(operator, only=["forward", "gradient"])
    line = in_python.__code__.co_firstlineno
    (name,) = report.unverified
    assert name.startswith(f"kernel for `cuda` at {Path(__file__).name}:{line} (")
    assert report.passed
    assert report.verdict() == f"unverified::cuda: passed; 1 limit; unverified: {name}"
    strict = opsmith.check(operator, only=["forward", "gradient"], strict=True)
    assert not strict.passed
    assert not strict.passed_as_asked
    assert strict.verdict() == f"unverified::cuda: FAILED: forward; 1 limit; unverified: {name}"
    accepted = opsmith.check(
        operator,
        only=["forward", "gradient"],
        strict=True,
        accept={("forward", "not-exercised"): "it runs on the machines with a GPU"},
    )
    assert accepted.passed
    assert accepted.unverified == ()
    assert accepted.verdict() == "unverified::cuda: passed; 1 accepted"
    assert with_baseline(strict, report).passed


def test_an_operator_whose_kernels_ran_has_none() -> None:
    operator = cubed("plain")
    operator.kernel("cpu")(lambda x: x * x * x)
    assert opsmith.check(operator, only=["forward"]).unverified == ()


def test_a_kernel_for_a_dtype_that_the_chosen_properties_do_not_use_is_unverified() -> None:
    operator = cubed("low")
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        operator.kernel("cpu", dtypes=[dtype])(lambda x: x * x * x)
    for only, ran in ((["determinism"], (2,)), (["layouts"], (1, 2)), (["forward"], (0, 1, 2))):
        report = opsmith.check(operator, only=only, effort="quick", strict=True)
        (outcome,) = [each for each in report.outcomes if not each.left_out]
        assert outcome.kernels == ran
        assert report.passed_as_asked is (ran == (0, 1, 2))
        assert bool(report.unverified) is (ran != (0, 1, 2))
        for failure in report.failures:  # what it says is done in the last turn
            assert failure.message.endswith("; add a sample that it takes or check `forward`, too")
    accepted = {("forward", "not-exercised"): "the samples are in float64"}
    report = opsmith.check(operator, only=["layouts"], effort="quick", strict=True, accept=accepted)
    assert (report.passed_as_asked, report.unverified) == (True, ())
    assert with_baseline(opsmith.check(operator, only=["layouts"], strict=True), report).passed_as_asked


def test_a_kernel_that_cannot_be_built_keeps_no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = cubed("kept").kernel("cpu", cpp="void kept(View<const float> x, View<float> y) {}")
    monkeypatch.setenv("CXX", "no-such-compiler")
    x = torch.ones(3)
    seen = weakref.ref(x)
    with warnings.catch_warnings(action="ignore"):
        operator.explain(x)
        operator.explain(x)
    del x
    assert seen() is None


def test_assert_correct_and_a_kernel_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = cubed("uncompiled").kernel(
        "cpu", cpp="void uncompiled(View<const float> x, View<float> y) {}", entry="uncompiled"
    )
    monkeypatch.setenv("CXX", "no-such-compiler")
    options: dict[str, Any] = {"only": ["forward", "gradient"], "effort": "quick"}
    (name,) = assert_correct(operator, **options).unverified
    assert "(there is no C++ compiler: no `no-such-compiler` in PATH)" in name
    with pytest.raises(AssertionError) as caught:
        assert_correct(operator, **options, strict=True)
    assert str(caught.value).startswith(
        f"unverified::uncompiled: FAILED: forward; 1 limit; unverified: {name}\n"
    )
    assert "or name yours in CXX" in str(caught.value)  # the way out
    monkeypatch.delenv("CXX")
    operator.reload()
    fixed = "template <class T> void uncompiled(View<const T, 1> x, View<T, 1> y) { "
    fixed += "for (int64_t i = 0; i < x.numel(); i++) y(i) = x(i) * x(i) * x(i); }"
    operator.kernel("cpu", cpp=fixed, entry="uncompiled")
    assert assert_correct(operator, **options, strict=True).unverified == ()


@NO_GPU
@pytest.mark.skipif(missing_interpreter() is not None, reason=str(missing_interpreter()))
def test_a_kernel_in_triton_is_verified_by_the_interpreter_alone() -> None:
    from unverified_kernels import interpreted, not_interpreted

    given = {"grid": 1, "constants": {"BLOCK": 4}}
    operator = cubed("interpreted").kernel("cuda", triton=interpreted, **given)
    assert opsmith.check(operator, only=["triton"], effort="quick").unverified == ()
    operator = cubed("not_interpreted").kernel("cuda", triton=not_interpreted, **given)
    [name] = opsmith.check(operator, only=["triton"], effort="quick").unverified
    line = not_interpreted.fn.__code__.co_firstlineno
    assert name.startswith(f"Triton kernel at unverified_kernels.py:{line} (3 calls not interpreted: ")
    assert ": Triton's interpreter cannot run the kernel: " in name
    assert name.endswith(" calls behind not run)")


REPORT = Report(
    "demo::op",
    (Outcome("forward", "passed"), Outcome("gradient", "passed")),
    seed=0,
    unverified=("CUDA kernel at scale.py:14",),
)


def test_every_form_of_a_report_shows_it() -> None:
    written = json.loads(REPORT.to_json())
    assert written["unverified"] == ["CUDA kernel at scale.py:14"]
    assert "passed; unverified: CUDA kernel at scale.py:14" in page([REPORT])
    assert str(REPORT).startswith("demo::op: passed; unverified: CUDA kernel at scale.py:14\n")
