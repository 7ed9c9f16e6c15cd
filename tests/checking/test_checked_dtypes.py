"""A report says in which dtypes a property was looked at, and what became of it there."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith
from opsmith import errors
from opsmith.checking import Failure, Outcome, Report
from opsmith.checking import subject as subject_module
from opsmith.checking.effort import EFFORTS
from opsmith.checking.report import read_reports
from opsmith.checking.subject_kinds import subject_of


@opsmith.operator("tests_dtypes::square")
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


square.gradients(x=lambda grad, x: -2 * grad * x)
square.kernel("cpu", lambda x: x * x * (1.5 if x.dtype == torch.bfloat16 else 1.0))
square.samples(lambda make: [(make(4, 5),)])


@pytest.fixture(scope="module")
def report() -> Report:
    return opsmith.check(square, only=["forward", "gradient"], effort="quick")


def row(report: Report, name: str) -> dict[str, str]:
    outcome = next(each for each in report.outcomes if each.property == name)
    return {dtype: outcome.in_dtype(dtype) for dtype in report.dtypes}


def test_a_kernel_that_is_wrong_in_one_dtype_is_right_in_the_others(report: Report) -> None:
    assert row(report, "forward") == {
        "float64": "passed",
        "float32": "passed",
        "bfloat16": "failed",
        "float16": "passed",
    }


def test_a_gradient_that_is_wrong_in_float64_is_wrong_in_float32_as_well(report: Report) -> None:
    assert row(report, "gradient") == {
        "float64": "failed",
        "float32": "failed",
        "bfloat16": "",
        "float16": "",
    }


def test_what_did_not_run_says_nothing_of_any_dtype(report: Report) -> None:
    assert set(row(report, "fake").values()) == {""}


def test_a_failure_that_names_no_dtype_leaves_all_of_them_open() -> None:
    raised = Failure("state", None, "raises", "no")
    outcome = Outcome("state", "failed", failures=(raised,), dtypes=("float32",))
    assert [outcome.in_dtype(each) for each in ("float32", "float16")] == ["unclear", ""]


def test_a_report_comes_back_from_its_json(report: Report) -> None:
    (read,) = read_reports(report.to_json()).values()
    assert (read.passed, read.failures[0].dtypes) == (False, ("bfloat16",))
    assert [each.property for each in read.outcomes] == [each.property for each in report.outcomes]
    several = json.dumps(
        {"schema": 4, "passed": False, "reports": [report.to_dict(), {**report.to_dict(), "operator": "b"}]}
        | {"unchecked": [], "interrupted": False}
    )
    assert list(read_reports(several)) == ["tests_dtypes::square", "b"]
    assert list(read_reports(json.dumps([report.to_dict()]))) == ["tests_dtypes::square"]


@pytest.mark.parametrize(
    ("text", "expected", "got", "place"),
    [
        ("{", "JSON", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)", None),
        ("[3]", "an object", "int 3", "$[0]"),
        ('{"schema": 1}', "4: Version", "int 1", "$.schema"),
        ('{"schema": 4}', "the keys `operator`", "the keys `schema`", "$"),
        ('{"schema": 4, "reports": [3]}', "the keys `passed`", "the keys `schema`, `reports`", "$"),
    ],
)
def test_what_is_no_report_is_told(text: str, expected: str, got: str, place: str | None) -> None:
    with pytest.raises(errors.ReportFormatError, match="the text is not a report") as raised:
        read_reports(text)
    error = raised.value
    assert (error.expected or "").startswith(expected)
    assert (error.got, error.where) == (got, place)


def test_a_dtype_is_looked_up_on_the_device_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of(opsmith.ops.exp, None, 0, EFFORTS["quick"])
    second = torch.device("cuda:1")
    subject.__dict__["devices"] = (second,)
    asked: list[object] = []
    monkeypatch.setattr(subject_module, "missing_device", lambda device, dtype: asked.append(device))
    assert subject.devices_with(torch.float64) == (second,)
    assert asked == [second]


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def by_placeholder(forward: Any, backward: Any) -> type[Function]:
    class Placed(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return forward(x)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            (x,) = ctx.saved_tensors
            return backward(grad, x)

    return Placed


def written(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape)
    out[:] = x * x
    return out.to(x.dtype)


def over_the_sum(x: Tensor) -> Tensor:
    total = torch.zeros(x.shape[0], 1)
    total += x.sum(-1, keepdim=True)
    return x * x + total.square()


def gathered(x: Tensor) -> Tensor:
    return torch.zeros(x.shape).index_add_(0, torch.arange(len(x)), x * x)


@pytest.mark.parametrize(
    ("forward", "backward", "found"),
    [
        (written, lambda grad, x: 2 * grad * x, {("forward", "precision", "warning")}),
        (lambda x: x * x, lambda grad, x: 2 * written(x) / x * grad, {("gradient", "precision", "warning")}),
        (gathered, lambda grad, x: 2 * grad * x, {("forward", "raises", "limit")}),
    ],
    ids=["forward", "backward", "raises"],
)
def test_a_placeholder_in_the_default_dtype_is_found(
    forward: Any, backward: Any, found: set[tuple[str, str, str]]
) -> None:
    report = opsmith.check(
        by_placeholder(forward, backward), samples=[(X,)], only=["forward", "gradient"], effort="quick"
    )
    assert found <= {(each.property, each.cause, each.severity) for each in report.failures}, report


def test_a_sum_in_the_default_dtype_is_named_with_what_to_write() -> None:
    report = opsmith.check(
        by_placeholder(over_the_sum, lambda grad, x: grad * x),
        samples=[(X,)],
        only=["forward"],
        effort="quick",
    )
    (failure,) = report.failures
    assert "its values go through a tensor in torch's default dtype" in failure.message
    assert (
        "for example of `torch.zeros(shape)`; create that tensor by `x.new_zeros(shape)`, or with "
        "`dtype=x.dtype`"
    ) in failure.message


def drawn_with_a_seed(x: Tensor) -> Tensor:
    return torch.rand(x.shape, generator=torch.Generator().manual_seed(3)) > 0.5


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        (lambda x: x * torch.tensor(0.1), lambda grad, x: grad * torch.tensor(0.1)),
        (lambda x: x * torch.linspace(0, 1, 4), lambda grad, x: grad * torch.linspace(0, 1, 4)),
        (lambda x: (x.float() ** 2).to(x.dtype), lambda grad, x: (2 * grad.float() * x.float()).to(x.dtype)),
        (lambda x: x * torch.ones(x.shape).triu(), lambda grad, x: grad * torch.ones(x.shape).triu()),
        (lambda x: torch.cat([torch.zeros(1, 4), x]), lambda grad, x: grad[1:]),
        (lambda x: x * drawn_with_a_seed(x), lambda grad, x: grad * drawn_with_a_seed(x)),
    ],
    ids=["constant", "weights", "cast", "mask", "padding", "drawn"],
)
def test_constants_in_the_default_dtype_and_casts_on_purpose_are_no_loss(forward: Any, backward: Any) -> None:
    report = opsmith.check(
        by_placeholder(forward, backward), samples=[(X,)], only=["forward", "gradient"], effort="quick"
    )
    assert not report.failures, report
