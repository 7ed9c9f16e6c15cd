"""Exceptions that are refusals of an operator, and those that merely read like one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

import opsmith
from opsmith.checking import Outcome
from opsmith.checking.effort import EFFORTS
from opsmith.checking.exceptions import raised_within, stated
from opsmith.checking.properties.torch.compile import refused
from opsmith.checking.properties.torch.vmap import refusal
from opsmith.checking.samples.variations import variations
from opsmith.checking.subject import Subject
from opsmith.checking.subject_kinds import subject_of

X = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) + 0.5


def outcome(checked: Any, check: str, sample: tuple[Any, ...] = (X,)) -> Outcome:
    report = opsmith.check(checked, samples=[sample], only=[check])
    return next(each for each in report.outcomes if each.property == check)


def raised(call: Callable[[], Any]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it was to raise")


class TangentWrittenInto(Function):
    """The sum of each row for all of it, whose tangent is written into where it was expanded."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sum(-1, keepdim=True).repeat(1, x.shape[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.width = inputs[0].shape[-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.sum(-1, keepdim=True).repeat(1, ctx.width)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.sum(-1, keepdim=True).expand(-1, ctx.width).mul_(1)


def test_a_tangent_that_writes_into_an_expanded_tensor_is_no_refusal() -> None:
    (failure,) = outcome(TangentWrittenInto, "forward_mode").failures
    assert failure.cause == "raises"
    assert "more than one element of the written-to tensor" in failure.message


class ComparedWithNone(Function):
    """The largest element so far in each place, with nothing to compare where there are no rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rows = [row.relu() for row in x]
        last = rows[-1].numel() if rows else None
        return torch.stack(rows) if last > 0 else x.clone()  # type: ignore[operator]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None


def test_what_python_does_not_support_is_no_refusal_of_empty_tensors() -> None:
    found = variations(subject_of(ComparedWithNone, [(X,)], 0, EFFORTS["default"]))
    assert "'>' not supported between instances of 'NoneType' and 'int'" in found.unserved[0].message


def subject(checked: Any) -> Subject:
    return subject_of(checked, [(X,)], 0, EFFORTS["quick"])


def test_torchs_words_excuse_vmap_only_where_torch_says_them() -> None:
    words = "We do not support tensors of three dimensions"

    def own() -> None:
        raise ValueError(words)

    asked = raised(lambda: torch.vmap(lambda x: x * x.sum().item())(X))
    assert refusal(subject(TangentWrittenInto), asked, empty=False) is not None
    assert refusal(subject(TangentWrittenInto), raised(own), empty=False) is None


def test_a_schema_is_no_word_about_a_symbol() -> None:
    square = opsmith.operator("excuses::square")(lambda_square)
    square.samples(lambda: [(X,)])
    declared = subject(square)
    wrong = raised(lambda: torch.ops.aten.view.default(X, "four"))
    assert "SymInt" in str(wrong)
    assert refused(declared, wrong) is None
    assert refused(declared, TypeError("'SymInt' object cannot be interpreted as an integer")) is not None


def lambda_square(x: Tensor) -> Tensor:
    return x * x


class Freed(Function):
    """x, whose backward lays another word in the place of a mode: torch says by `raise` that it is none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = "nearest"
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        kept, ctx.kept = ctx.kept, "none"
        return F.interpolate(grad[None, None], scale_factor=1.0, mode=kept)[0, 0]


class Says(Freed):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        kept, ctx.kept = ctx.kept, None
        if kept is None:
            raise RuntimeError("this backward runs once")
        return grad.clone()


def test_a_second_backward_that_fails_inside_of_torch_is_a_fault() -> None:
    (failure,) = outcome(Freed, "effects").failures
    assert failure.cause == "mutates-saved"


class SaysInOneLine(Freed):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if ctx.kept is None: raise RuntimeError("this backward runs once")  # fmt: skip  # noqa: E701
        ctx.kept = None
        return grad.clone()


@pytest.mark.parametrize("checked", [Says, SaysInOneLine])
def test_a_second_backward_that_is_refused_in_words_is_noted(checked: Any) -> None:
    found = outcome(checked, "effects")
    assert found.status == "passed"
    assert "a second backward through the same graph is refused: this backward runs once" in found.notes


def test_who_raises_by_a_statement_and_who_by_a_call() -> None:
    def states() -> None:
        raise ValueError("no")

    def calls() -> None:
        torch.ones(2).view(7)

    def within_torch() -> None:
        F.pad(torch.ones(2), (1, 1, 1, 1), mode="circular")

    found = {call: raised(call) for call in (states, calls, within_torch)}
    assert [stated(error) for error in found.values()] == [True, False, False]
    assert [raised_within(error) for error in found.values()] == [True, True, False]


class ByReduction(Function):
    """A squared distance, without a gradient of what is not reduced."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.reduction = reduction
        return {"mean": torch.mean, "sum": torch.sum, "none": torch.clone}[reduction]((x - y) ** 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        ctx.refuse(ctx.reduction)
        gradient = 2 * (x - y) * grad / (x.numel() if ctx.reduction == "mean" else 1)
        return gradient, -gradient, None


def in_words(reduction: str) -> None:
    if reduction == "none":
        raise NotImplementedError("reduction none is not supported in the backward")


def by_assertion(reduction: str) -> None:
    assert reduction != "none", "reduction none is not supported in the backward"


def by_mistake(reduction: str) -> None:
    {"mean": 1, "sum": 2}[reduction]


def after_a_mistake(reduction: str) -> None:
    try:
        by_mistake(reduction)
    except KeyError:
        raise RuntimeError("the backward failed")  # noqa: B904 - as people write it


def inside_of_python(reduction: str) -> None:
    os.environ["a variable that is set" if reduction == "none" else "PATH"]


def refusing(how: Callable[[str], None]) -> type[Function]:
    class Refusing(ByReduction):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            ctx.refuse = how
            return ByReduction.backward(ctx, grad)

    return Refusing


MODES = [(X, X + 1, "mean"), (X, 2 * X, "none"), (X, X * X, "sum")]


@pytest.mark.slow
@pytest.mark.every(4)
@pytest.mark.parametrize("how", [in_words, by_assertion], ids=["raise", "assert"])
@pytest.mark.parametrize("samples", [MODES, MODES[:1]], ids=["a-sample", "a-value-of-the-code"])
def test_a_gradient_that_is_refused_in_one_mode_is_a_limit(how: Any, samples: Any) -> None:
    report = opsmith.check(refusing(how), samples=samples, effort="quick")
    assert report.passed, report
    (failure,) = report.failures
    assert (failure.property, failure.input, failure.severity) == ("gradient", "x, y", "limit")
    assert "reduction none is not supported in the backward" in failure.message
    assert "reduction='none'" in str(failure.evidence["sample"])


@pytest.mark.slow
@pytest.mark.every(8)
@pytest.mark.parametrize("how", [by_mistake, after_a_mistake, inside_of_python])
def test_a_mistake_in_one_mode_is_an_error(how: Any) -> None:
    report = opsmith.check(refusing(how), samples=MODES, effort="quick")
    assert {(each.property, each.cause) for each in report.errors if each.follows is None} == {
        ("gradient", "raises")
    }


def test_a_gradient_that_is_refused_in_every_sample_is_not_checked() -> None:
    def always(reduction: str) -> None:
        in_words("none")

    report = opsmith.check(refusing(always), samples=MODES[1:2], effort="quick", only=["gradient"])
    assert not report.failures
    (outcome,) = [each for each in report.outcomes if each.property == "gradient"]
    assert outcome.status == "skipped"
    assert "the operator refuses a gradient of `x`: NotImplementedError: reduction none" in outcome.reason


WEIGHT = torch.rand(4, 5, generator=torch.Generator().manual_seed(1))


def demanding_float32(x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        raise TypeError(f"expected float32, got {x.dtype}")
    return x @ WEIGHT


class InFloat32(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return demanding_float32(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad @ WEIGHT.T


class ByBuffer(InFloat32):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x @ WEIGHT


class BackwardByBuffer(InFloat32):
    """The forward takes float64, and the backward fails there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x @ WEIGHT.to(x.dtype)


class WrongInFloat32(InFloat32):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad @ WEIGHT.T


@pytest.mark.slow
def test_float64_that_is_refused_in_words_is_a_limit_and_the_rest_is_checked_in_float32() -> None:
    report = opsmith.check(InFloat32, samples=[(X,)], effort="quick")
    assert report.passed, report
    (failure,) = report.failures
    assert (failure.property, failure.cause, failure.severity) == ("forward", "raises", "limit")
    words = "TypeError: expected float32, got torch.float64"
    assert failure.message == f"it takes float32 and not float64: {words}"
    assert failure.where == f"{__file__}:{demanding_float32.__code__.co_firstlineno + 2}"
    assert failure.dtypes == ("float64",)
    assert (
        f"the operator takes float32, but not float64 ({words}), so it was checked in float32"
        in report.remarks
    )


@pytest.mark.slow
def test_what_is_wrong_in_float32_is_found_where_float64_is_refused() -> None:
    report = opsmith.check(WrongInFloat32, samples=[(X,)], effort="quick")
    assert {(each.property, each.cause) for each in report.errors if each.follows is None} == {
        ("gradient", "sign")
    }


def test_a_wrong_gradient_of_what_is_declared_to_compute_in_float32_is_found() -> None:
    class Cast(WrongInFloat32):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return (x.float() @ WEIGHT).to(x.dtype)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return -(grad.float() @ WEIGHT.T).to(grad.dtype)

    operator = opsmith.adopt(Cast, "excuses::cast", kind="float32")
    report = opsmith.check(operator, samples=[(X,)], effort="quick", only=["forward", "gradient"])
    assert [(each.input, each.cause) for each in report.failures] == [("x", "sign")]


@pytest.mark.slow
@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("kind", "severity"), [(ByBuffer, "limit"), (BackwardByBuffer, "error")], ids=["forward", "backward"]
)
def test_a_buffer_in_float32_is_one_finding(kind: type[Function], severity: str) -> None:
    report = opsmith.check(kind, samples=[(X,)], effort="quick")
    (failure,) = [each for each in report.failures if each.follows is None]
    assert (failure.cause, failure.severity) == ("raises", severity)
    assert "same dtype" in failure.message


class ByEye(Function):
    """One mode multiplies by a matrix in float32, which takes no float64."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by_matrix: bool) -> Tensor:
        return x @ (3.0 * torch.eye(x.shape[-1])) if by_matrix else 3.0 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return 3.0 * grad, None


def test_float64_that_no_sample_has_is_undeclared_whatever_sample_shows_it() -> None:
    samples = [(X, False), (X[:2], True)]
    report = opsmith.check(ByEye, samples=samples, effort="quick", only=["forward", "gradient", "vmap"])
    (failure,) = report.failures
    assert (failure.property, failure.given, failure.severity) == ("forward", "undeclared", "limit")
    assert str(failure.evidence["sample"]).startswith("sample 1")
    samples[0] = (X.double(), False)
    report = opsmith.check(ByEye, samples=samples[::-1], effort="quick", only=["forward"])
    assert [each.severity for each in report.failures] == ["error"], report


@torch.library.custom_op("refusals::towards_zero", mutates_args=())
def towards_zero(x: Tensor) -> Tensor:
    return torch.lerp(x, torch.zeros(()), 0.25)


def test_an_operator_of_torch_that_takes_no_float64_gets_a_limit() -> None:
    report = opsmith.check(towards_zero, samples=[(X,)], effort="quick", only=["forward"])
    assert [(each.given, each.severity) for each in report.failures] == [("undeclared", "limit")], report


def test_samples_in_float64_are_not_narrowed() -> None:
    report = opsmith.check(InFloat32, samples=[(X.double(),)], effort="quick")
    (failure,) = report.failures
    assert (failure.property, failure.severity) == ("forward", "error")
