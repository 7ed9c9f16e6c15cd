"""Severity: errors, warnings and limits, by the table of the documentation."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from functions import Backwards
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.checking import Failure, Outcome, Report
from opsmith.checking.causes import CAUSES
from opsmith.checking.effort import EFFORTS
from opsmith.checking.processes.watchdog import EndlessCallError, Watchdog
from opsmith.checking.property import MISSING_HERE, endless, raised
from opsmith.checking.report import GIVEN
from opsmith.checking.severity import TABLE, WHATEVER, circumstance, graded, severity_of
from opsmith.checking.subject_kinds import subject_of

ROOT = Path(__file__).resolve().parents[2]


class DetachedSecondOrder(torch.autograd.Function):
    """Its gradient is right, and cannot be differentiated rightly."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.slope = x.cos().detach()
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        slope: Tensor = ctx.slope
        return grad * slope


class Slope(torch.autograd.Function):
    """Backward of `HandwrittenSecondOrder`, whose own backward is wrong."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(grad, x)
        return grad * x.cos()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor]:
        grad, x = ctx.saved_tensors
        return outer * x.cos(), outer * grad * x.sin()  # the sign of the second is wrong


class HandwrittenSecondOrder(torch.autograd.Function):
    """It promises a second order, since its backward applies a Function, and gives a wrong one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        found: Tensor = Slope.apply(grad, *ctx.saved_tensors)
        return found


class SlopeRefused(Slope):
    """Backward of `RefusedSecondOrder`."""

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor]:
        assert not ctx.needs_input_grad[1]
        return outer * ctx.saved_tensors[1].cos(), torch.zeros_like(outer)


class RefusedSecondOrder(torch.autograd.Function):
    """Its backward applies a Function, whose own backward refuses a gradient by `x` in its own words."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        found: Tensor = SlopeRefused.apply(grad, *ctx.saved_tensors)
        return found


class BrokenSecondOrder(RefusedSecondOrder):
    """Its second backward raises by mistake."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        found: Tensor = SlopeBroken.apply(grad, *ctx.saved_tensors)
        return found


class SlopeBroken(Slope):
    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor]:
        return outer * ctx.saved_tensors[2], outer


class WrongTangent(torch.autograd.Function):
    """It has a `jvp`, which is wrong."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos()

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return -tangent * x.cos()


class NanAtZero(torch.autograd.Function):
    """Its gradient is nan at zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.abs()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x / x.abs()


class Float32Inside(torch.autograd.Function):
    """Its backward computes in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (grad.float() * x.float().cos()).to(x.dtype)


class LowPrecisionInside(torch.autograd.Function):
    """Its backward computes in bfloat16, whatever comes in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (grad.bfloat16() * x.bfloat16().cos()).to(x.dtype)


class OwnRuleRaises(torch.autograd.Function):
    """Its own rule for `vmap` raises."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos()

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        raise ValueError("no rule after all")


@opsmith.operator("severity::scaled")
def scaled(x: Tensor, weight: Tensor) -> Tensor:
    return x.sin() * weight


never_reached = scaled.gradients(weight=lambda grad, x: grad * x.sin())


def report_on(function_class: type, *only: str) -> Report:
    torch.manual_seed(0)
    samples = [(torch.randn(3, 4),)]
    return opsmith.check(function_class, samples=samples, only=["forward", "gradient", *only], effort="quick")


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("function_class", "property", "cause", "severity"),
    [
        (Backwards, "gradient", "sign", "error"),
        (LowPrecisionInside, "gradient", "precision", "warning"),
        (HandwrittenSecondOrder, "second_order", "second-order", "error"),
        (WrongTangent, "forward_mode", "forward-mode", "error"),
        (DetachedSecondOrder, "second_order", "second-order", "warning"),
        (NanAtZero, "values", "nan", "error"),
        (Float32Inside, "gradient", "precision", "warning"),
        (OwnRuleRaises, "vmap", "raises", "error"),
        (BrokenSecondOrder, "second_order", "raises", "error"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_severity_of_a_failure(function_class: type, property: str, cause: str, severity: str) -> None:
    report = report_on(function_class, property)
    found = {(each.property, each.cause): each.severity for each in report.failures}
    assert found.get((property, cause)) == severity, report
    assert report.passed is (severity != "error")
    assert not replace(report, strict=True).passed


def test_a_second_order_that_a_class_refuses_in_its_own_words_is_a_limit() -> None:
    (failure,) = report_on(RefusedSecondOrder, "second_order").failures
    assert (failure.property, failure.cause, failure.severity) == ("second_order", "raises", "limit")


def test_the_evidence_says_that_a_kernel_cannot_be_compiled_and_no_name_of_an_exception() -> None:
    class CompileError(RuntimeError):
        """An exception of somebody else, of that name."""

    subject = subject_of(never_reached, [(torch.randn(3, 4), torch.arange(4))], 0, EFFORTS["quick"])

    def severity(error: Exception) -> str:
        failure = raised("vmap", subject, error, "sample 0")
        assert failure.evidence["exception"] == type(error).__name__
        failure = replace(failure, given=circumstance(failure, subject))
        return graded(Outcome("vmap", "failed", failures=(failure,))).failures[0].severity

    assert severity(CompileError("no such word")) == "limit"
    assert severity(errors.CompileError("no such word")) == "error"
    assert severity(errors.KernelSignatureError("no such parameter")) == "error"


def test_a_formula_that_no_sample_reaches_is_a_limit() -> None:
    samples = [(torch.randn(3, 4), torch.arange(4))]
    report = opsmith.check(never_reached, samples=samples, only=["forward", "gradient"], effort="quick")
    assert [(each.cause, each.severity) for each in report.failures] == [("not-exercised", "limit")]
    assert report.passed
    assert replace(report, strict=True).passed


def test_an_error_of_forward_in_a_dtype_of_few_digits_alone_is_a_limit() -> None:
    class Float32Only(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if x.dtype in (torch.bfloat16, torch.float16):
                x = x.new_zeros(2, 3) @ x.new_zeros(2, 3)  # raises
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad * x.cos()

    report = report_on(Float32Only)
    assert not report.errors, report
    assert report.passed, report


def counted(*severities: str, **options: Any) -> Report:
    made = [
        Failure("gradient", None, "sign", str(number), severity=each)  # type: ignore[arg-type]
        for number, each in enumerate(severities)
    ]
    status = "failed" if "error" in severities else "passed"
    outcomes = (Outcome("forward", "passed"), Outcome("gradient", status, failures=tuple(made)))  # type: ignore[arg-type]
    return Report("demo::op", outcomes, seed=0, **options)


@pytest.mark.parametrize(
    ("severities", "strict", "verdict"),
    [
        ((), False, "passed"),
        (("limit",), True, "passed; 1 limit"),
        (("warning", "limit", "limit"), False, "passed; 1 warning, 2 limits"),
        (("warning",), True, "FAILED: gradient; 1 warning"),
        (("limit", "error", "warning", "error"), False, "FAILED: gradient; 2 errors, 1 warning, 1 limit"),
    ],
)
def test_the_verdict_counts_each_severity(severities: tuple[str, ...], strict: bool, verdict: str) -> None:
    report = counted(*severities, strict=strict)
    assert report.verdict() == f"demo::op: {verdict}"
    assert report.passed is verdict.startswith("passed")


def test_errors_come_first_and_what_another_failure_explains_comes_last() -> None:
    report = counted("limit", "error", "warning")
    outcome = report.outcomes[1]
    follower = Failure("gradient", None, "sign", "follower", follows="forward")
    every = replace(outcome, failures=(follower, *outcome.failures))
    report = replace(report, outcomes=(report.outcomes[0], every))
    assert [each.severity for each in report.failures] == ["error", "warning", "limit", "error"]
    assert report.failures[-1] is follower
    assert len(report.errors) == 1
    text = str(report)
    assert text.index("\ngradient: sign") < text.index("\nwarning: gradient: sign")
    assert text.index("\nwarning: gradient: sign") < text.index("\nlimit: gradient: sign")
    assert {key: report.to_dict()[key] for key in ("errors", "warnings", "limits")} == {
        "errors": 1,
        "warnings": 1,
        "limits": 1,
    }


def test_a_warning_explains_no_error() -> None:
    from opsmith.checking.severity import name_roots

    def outcomes(severity: str) -> list[Outcome]:
        root = Failure("forward", "x", "shape", "root", severity=severity)  # type: ignore[arg-type]
        late = Failure("compile", "x", "shape", "late")
        return [
            Outcome("forward", "failed", failures=(root,)),
            Outcome("compile", "failed", failures=(late,)),
        ]

    def follows(severity: str) -> str | None:
        return name_roots(outcomes(severity))[1].failures[0].follows

    assert follows("error") == "forward"
    assert follows("warning") is None


@pytest.mark.parametrize(
    ("status", "severities", "word"),
    [
        ("passed", (), "passed"),
        ("passed", ("limit",), "limit"),
        ("passed", ("limit", "warning"), "warning"),
        ("failed", ("error", "limit"), "failed"),
        ("skipped", ("limit",), "skipped"),
    ],
)
def test_the_word_for_a_property(status: Any, severities: tuple[Any, ...], word: str) -> None:
    failures = tuple(Failure("vmap", None, "raises", "m", severity=each) for each in severities)
    assert Outcome("vmap", status, failures=failures).word() == word


def test_the_documentation_has_the_table() -> None:
    text = (ROOT / "docs" / "checking.md").read_text(encoding="utf-8")
    word = "(error|warning|limit)"
    rows = re.findall(rf"^\| `(\w+)`:? .*\| {word} \| {word} \|$", text, re.MULTILINE)
    assert rows == [(given, each["wrong"], each["raises"]) for given, each in TABLE.items()]


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_has_a_severity_in_each_circumstance(cause: str, given: Any) -> None:
    said = severity_of(Failure("gradient", "x", cause, "it is so", given=given))
    assert said == WHATEVER.get(CAUSES[cause].happened) or said == TABLE[given].get(CAUSES[cause].happened)


def test_a_minor_difference_is_a_warning_and_damage_is_an_error_whatever_is_given() -> None:
    minor = Failure("forward", "result", "kernel-mismatch", "its last digits", minor=True)
    dead = Failure("vmap", None, "raises", "it died", evidence={"signal": "SIGSEGV"}, given="unpromised")
    absent = Failure("forward", None, "raises", "no GPU", evidence={MISSING_HERE: "a GPU"})
    assert [severity_of(each) for each in (minor, dead, absent)] == ["warning", "error", "limit"]


@pytest.mark.slow
def test_a_reference_that_looks_at_data_is_a_limit_and_an_authors_fake_that_does_is_an_error() -> None:
    @opsmith.operator("severity::branching")
    def branching(x: Tensor) -> Tensor:
        return x.sin() if bool(x.sum() > 0) else x.cos()

    options: dict[str, Any] = {"only": ["forward", "gradient", "fake"], "effort": "quick"}
    derived = opsmith.check(branching, samples=[(torch.randn(3, 4),)], **options)
    assert [(each.property, each.cause, each.severity) for each in derived.failures] == [
        ("fake", "raises", "limit")
    ]
    assert derived.passed

    def fake(x: Tensor) -> Tensor:
        return x.new_empty(x.shape) if bool(x.sum() > 0) else x

    branching.fake(fake)
    own = opsmith.check(branching, samples=[(torch.randn(3, 4),)], **options)
    assert [(each.property, each.cause, each.severity) for each in own.failures] == [
        ("fake", "fake-mismatch", "error")
    ]


class SoftTarget(torch.autograd.Function):
    """A loss: nobody differentiates by its target."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(logits, target)
        return (logits * target).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        _, target = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None
        return grad * target, None


class ForgottenTarget(SoftTarget):
    """It returns a gradient by the target, if only at times."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        logits, target = ctx.saved_tensors
        return grad * target, grad * logits if len(logits) > 100 else None


class NamedTarget(SoftTarget):
    """It returns the gradients by their names, of which one is never anything but None."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        _, target = ctx.saved_tensors
        grad_logits, grad_target = None, None
        if ctx.needs_input_grad[0]:
            grad_logits = grad * target
        return grad_logits, grad_target


class ReservedName(torch.autograd.Function):
    """It has an argument with a name that formulas use for something else, and another behind a star."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *targets: Any) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(targets[1])
        return (grad * targets[1]).sum() * targets[0]

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None


@pytest.mark.parametrize(
    ("kind", "severity"), [(SoftTarget, "warning"), (NamedTarget, "warning"), (ForgottenTarget, "error")]
)
def test_no_gradient_in_every_return_statement_is_a_warning(kind: Any, severity: str) -> None:
    samples = [(torch.randn(3, 4), torch.rand(3, 4))]
    report = opsmith.check(kind, samples=samples, only=["forward", "gradient"], effort="quick")
    (failure,) = report.failures
    assert (failure.input, failure.cause, failure.severity) == ("target", "missing-gradient", severity)
    declared = "declare it by `operator.gradients(target=opsmith.non_differentiable)`"
    assert (declared in failure.message) is (severity == "warning")


def test_an_argument_is_known_by_its_position() -> None:
    samples = [(torch.randn(3, 4), 2.0, torch.rand(3, 4))]
    report = opsmith.check(ReservedName, samples=samples, only=["gradient"], effort="quick")
    assert {each.input: each.severity for each in report.failures} == {
        "grad_": "warning",
        "targets1": "warning",
    }


def test_what_the_warning_says_to_declare_is_accepted() -> None:
    samples = [(torch.randn(3, 4), torch.rand(3, 4))]
    operator = opsmith.adopt(SoftTarget, "severity::soft_target", samples=samples)
    operator.gradients(target=opsmith.non_differentiable)
    report = opsmith.check(operator, only=["forward", "gradient"], effort="quick")
    assert report.passed, report
    assert not report.failures, report


HANGS = {"sample": "sample 0 (x [3]) in float32", "limit": "10 s"}


@pytest.mark.parametrize(("dtype", "severity"), [(torch.float64, "limit"), (torch.float32, "error")])
def test_a_class_that_does_not_end_in_a_dtype_without_a_sample_is_a_limit(
    dtype: torch.dtype, severity: str
) -> None:
    subject = subject_of(Backwards, [(torch.randn(3, dtype=dtype),)], 0, EFFORTS["quick"])
    failure = Failure("forward", None, "raises", "a call does not return", None, HANGS, dtypes=("float32",))
    assert severity_of(replace(failure, given=circumstance(failure, subject))) == severity


def test_a_hang_at_numbers_that_nobody_passes_is_a_limit_and_says_them() -> None:
    error, watched = EndlessCallError(), Watchdog(())
    error.strained, error.when = True, ", where `x` has values near overflow in it"
    failure = endless("values", "file.py:1", error, watched)
    assert failure.message == "a call does not return, where `x` has values near overflow in it"
    assert severity_of(failure) == "limit"
