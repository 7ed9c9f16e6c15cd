"""Arguments that hold no tensors take the values that types and code know, if the forward takes them."""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

import opsmith
from opsmith.checking.effort import EFFORTS
from opsmith.checking.samples.argument_values import compared_values
from opsmith.checking.samples.variations import variations
from opsmith.checking.subject_kinds import subject_of

X = torch.tensor([[0.3, -1.2, 0.7], [1.1, 0.4, -0.6]])
FACTORS = {"relu": 1.0, "gelu": 2.0}
BY_TEXT = {str(position): position for position in range(40)}
LIMIT = 3


def scaled(x: Tensor, how: str) -> Tensor:
    return x * x if how.lower() == "square" else 3 * x


class ByName(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mode: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.how = mode
        return scaled(x, mode)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * (x if ctx.how == "square" else 3), None  # 2 x is right


class BySize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int) -> Tensor:
        ctx.factor = 2.0 if k > LIMIT else 1.0
        return x * ctx.factor

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class ByRemainder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int) -> Tensor:
        ctx.odd = k % 2
        return -x if k % 2 == 1 else x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class ByFlag(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, halved: bool) -> Tensor:
        return x / 2 if halved else x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class ByTable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        return x * FACTORS[name]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class ByMatch(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, name: str) -> Tensor:
        match name:
            case "twice" | "two":
                return 2 * x
            case _:
                return 1 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.name = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class BySizeOfFour(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int) -> Tensor:
        ctx.aligned = k % 4 < 1
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * (3 if ctx.aligned else 2), None


class ByOneName(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        return x * 2 if name == "double" else x * 3

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2, None


class ByTwoNames(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x * 2 if name == "double" else x * 3 if name == "triple" else x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * (2 if ctx.name == "double" else 3), None


class ByOneNumber(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        return x.cumsum(-1) if dim == -1 else x.cumsum(dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].flip(-1).cumsum(-1).flip(-1), None


class AlongOneDimension(torch.autograd.Function):
    """Its backward knows the last dimension alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        return x.cumsum(dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].flip(-1).cumsum(-1).flip(-1), None


class WithOneSlope(torch.autograd.Function):
    """Its backward knows one slope alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        ctx.save_for_backward(x)
        return torch.where(x > 0, x, x * slope)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, grads[0], grads[0] * 0.01), None


class WithoutWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * 2 if weight is None else x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return (grads[0], None) if weight is None else (grads[0] * weight, (grads[0] * x).sum(0))


class WithDefault(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any = None, eps: float = 0.0) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * 2 if weight is None else x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        if weight is None:
            return grads[0], None, None
        return grads[0] * weight, (grads[0] * x).sum(0), None


WRONG: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "a name that backward compares": (ByName, (X, "triple"), "mode='square'"),
    "a number in a global": (BySize, (X, 2), "k=4"),
    "a remainder": (ByRemainder, (X, 2), "k=3"),
    "a remainder of four": (BySizeOfFour, (X, 6), "k=4"),
    "the only name": (ByOneName, (X, "double"), "name='other'"),
    "a third branch": (ByTwoNames, (X, "double"), "name='other'"),
    "the only number": (ByOneNumber, (X, -1), "dim=0"),
    "a number that nothing compares": (AlongOneDimension, (X, -1), "dim=-2"),
    "a float that nothing compares": (WithOneSlope, (X, 0.01), "slope=0.0075"),
    "a flag": (ByFlag, (X, False), "halved=True"),
    "a key of a table": (ByTable, (X, "relu"), "name='gelu'"),
    "a case": (ByMatch, (X, "once"), "name='twice'"),
    "None that the code knows": (WithoutWeight, (X, X[0]), "weight=None"),
    "None by default": (WithDefault, (X, X[0]), "weight=None"),
}


@pytest.mark.every(6)
@pytest.mark.parametrize("name", WRONG)
def test_a_gradient_that_is_wrong_at_a_value_that_no_sample_shows_is_found_quickly(name: str) -> None:
    function, sample, value = WRONG[name]
    report = opsmith.check(function, samples=[sample], only=["forward", "gradient"], effort="quick")
    (failure,) = report.failures
    assert (failure.property, failure.input) == ("gradient", "x")
    assert value in failure.evidence["sample"]


class Mode(Enum):
    PLAIN = 1
    SQUARED = 2


def test_a_kernel_that_is_wrong_for_a_name_or_a_member_is_found() -> None:
    @opsmith.operator("argument_values::named")
    def named(x: Tensor, mode: Mode, how: Literal["up", "down"], by: float | None) -> Tensor:
        y = x * x if mode is Mode.SQUARED else x * 1
        y = y if by is None else y * by
        return -y if how == "down" else y

    named.kernel("cpu", lambda x, mode, how, by: (x * 1 if mode is Mode.PLAIN else x**2) * (by or 2.0))
    report = opsmith.check(named, samples=[(X, Mode.PLAIN, "up", 2.0)], only=["forward"], effort="quick")
    shown = " ".join(report.inputs)
    assert "mode=<Mode.SQUARED: 2>" in shown
    assert "how='down'" in shown
    assert "by=None" in shown
    assert [failure.cause for failure in report.failures] == ["kernel-mismatch"]


class WithADefaultSlope(WithOneSlope):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float = 0.01) -> Tensor:
        return WithOneSlope.forward(ctx, x, slope)


class WithOneGradient(WithADefaultSlope):
    """Its author passes no slope: it returns no gradient for one."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return WithOneSlope.backward(ctx, *grads)[0]


def test_a_default_that_no_sample_passes_is_tried_if_the_backward_takes_it() -> None:
    wrong, right = (
        opsmith.check(each, samples=[(X,)], only=["gradient"], effort="quick")
        for each in (WithADefaultSlope, WithOneGradient)
    )
    assert [(each.input, each.severity) for each in wrong.failures] == [("x", "error")]
    assert "slope=0.0075" in wrong.failures[0].evidence["sample"]
    assert right.passed_as_asked, right


def test_a_list_that_is_the_default_of_an_argument_is_no_state() -> None:
    @opsmith.operator("argument_values::flipped")
    def flipped(x: Tensor, dims: list[int] = [-1]) -> Tensor:  # noqa: B006
        return x.flip(dims)

    report = opsmith.check(flipped, samples=[(X,)], effort="quick")
    assert report.passed, report


def test_a_default_that_no_sample_passes_is_tried_of_an_operator_too() -> None:
    @opsmith.operator("argument_values::leaky")
    def leaky(x: Tensor, slope: float = 0.01) -> Tensor:
        return torch.where(x > 0, x, x * slope)

    leaky.gradients(x=lambda grad, x: torch.where(x > 0, grad, grad * 0.01))
    report = opsmith.check(leaky, samples=[(X,)], only=["gradient"], effort="quick")
    assert [(each.property, each.severity) for each in report.failures] == [("gradient", "error")]
    assert "slope=0.0075" in report.failures[0].evidence["sample"]


@pytest.mark.parametrize("base", [float, int, int | float])
def test_a_number_that_every_sample_leaves_out_is_tried(base: Any) -> None:
    def scaled(x: Tensor, by: Any = None) -> Tensor:
        return x * (x.shape[-1] ** -0.5 if by is None else by)

    scaled.__annotations__["by"] = base | None
    operator = opsmith.operator(
        f"argument_values::scaled_{base.__name__ if base in (int, float) else 'number'}"
    )(scaled)
    operator.gradients(x=lambda grad, x: grad * x.shape[-1] ** -0.5)  # it forgets the number
    report = opsmith.check(operator, samples=[(X,)], only=["gradient"], effort="quick")
    assert [(each.input, each.severity) for each in report.failures] == [("x", "error")]
    assert f"by={2 if base is int else 0.625} instead of None" in " ".join(report.inputs).replace("`", "")


class Choosing(torch.autograd.Function):
    """Right: every branch has its gradient, or refuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mode: str, k: int, both: bool, noisy: bool, p: float) -> Any:
        if mode not in ("sum", "mean"):
            raise ValueError("no such mode")
        if k < 0:
            raise ValueError("k is negative")
        ctx.mode, ctx.shape, ctx.p = mode, x.shape, p
        if both:
            return x.sum(), x.mean()
        if noisy:
            x = x + torch.randn_like(x)
        ctx.p = 1.0 if p > 0.5 else 2.0
        return (x.sum() if mode == "sum" else x.mean()) * ctx.p

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        count = 1 if ctx.mode == "sum" else ctx.shape.numel()
        return (grads[0] * ctx.p / count).expand(ctx.shape), None, None, None, None, None


@pytest.mark.slow
def test_branches_that_are_right_or_refuse_pass() -> None:
    sample = (X, "sum", 3, False, False, 0.25)
    report = opsmith.check(Choosing, samples=[sample], only=["forward", "gradient"])
    assert report.passed_as_asked, report
    shown = " ".join(report.inputs)
    assert "mode='mean'" in shown
    assert "p=0.75" in shown
    assert "both=True" not in shown
    assert "noisy=True" not in shown
    assert any("it draws random numbers" in text for text in report.rejected)


def test_what_samples_show_is_not_tried_again_and_the_number_is_limited() -> None:
    @opsmith.operator("argument_values::many")
    def many(x: Tensor, mode: str, flag: bool = False) -> Tensor:
        return x * BY_TEXT.get(mode, 1) * (2 if flag else 1)

    samples = [(X, "1", True), (X, "2", False)]
    for effort, limit in (("quick", 4), ("default", 12)):
        found = variations(subject_of(many, samples, 0, EFFORTS[effort])).samples
        chosen = (
            each for each in found if each.change and each.change.given != "usual" and each.dims == X.dim()
        )
        tried = [sample.flat[1] for sample in chosen]
        assert tried == [str(position) for position in [0, *range(3, 40)][:limit]]
        assert not [sample for sample in found if "flag" in sample.origin and sample.given != "usual"]


def test_an_operator_without_such_arguments_has_no_more_inputs_than_before() -> None:
    subject = subject_of(opsmith.ops.exp, None, 0, EFFORTS["quick"])
    changes = [sample.change for sample in variations(subject).samples]
    assert not [change for change in changes if change is not None and change.given != "usual"]
    assert compared_values(subject) == {}


class Unfinished(torch.autograd.Function):
    """Its backward refuses what its forward takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mode: str) -> Tensor:
        ctx.mode = mode
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.mode == "reflect":
            raise NotImplementedError("no gradient of reflect")
        return grads[0] * 2, None


@pytest.mark.slow
def test_an_exception_for_a_value_that_the_code_alone_knows_is_a_limit() -> None:
    shown = opsmith.check(Unfinished, samples=[(X, "zeros")], only=["forward", "gradient"])
    assert shown.passed_as_asked
    assert [(failure.cause, failure.severity) for failure in shown.failures] == [("raises", "limit")]
    meant = opsmith.check(Unfinished, samples=[(X, "zeros"), (X, "reflect")], only=["forward", "gradient"])
    assert meant.passed_as_asked
    (failure,) = meant.failures
    assert (failure.property, failure.severity) == ("gradient", "limit")
    assert failure.message == "NotImplementedError: no gradient of reflect"


class WithSlope(torch.autograd.Function):
    """A class that calls an argument in its backward, for which None is no value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any, slope: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.slope = slope
        return function(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * ctx.slope(x), None, None


@pytest.mark.slow
def test_none_is_no_value_of_an_argument_that_takes_any_object() -> None:
    report = opsmith.check(WithSlope, samples=[(X, torch.sin, torch.cos)], effort="quick")
    assert not report.failures, report
    assert not [text for text in report.inputs if "None" in text]


class BySumOrMean(torch.autograd.Function):
    """Its backward names both, and its forward one: any other is a mean."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name, ctx.shape = name, x.shape
        return x.sum() if name == "sum" else x.mean()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.name == "sum":
            return grads[0].expand(ctx.shape), None
        if ctx.name == "mean":
            return grads[0].expand(ctx.shape) / ctx.shape.numel(), None
        return None


@pytest.mark.parametrize(
    ("function", "sample"), [(BySumOrMean, (X, "sum")), (Choosing, (X, "sum", 3, False, False, 0.25))]
)
def test_a_branch_for_others_that_a_known_value_takes_or_that_refuses_is_left_alone(
    function: Any, sample: Any
) -> None:
    report = opsmith.check(function, samples=[sample], only=["forward", "gradient"])
    assert report.passed, report
    assert not [text for text in report.inputs if "'other'" in text]


NOTHING = np.zeros(3)


class AgainstAnArray(torch.autograd.Function):
    """It compares an argument with an array of NumPy, which has no single answer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Any) -> Tensor:
        ctx.by = 1.0 if by is NOTHING else by
        return x * ctx.by

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.by, None


@pytest.mark.parametrize("by", [2.0, NOTHING], ids=["number", "array"])
def test_a_comparison_with_an_array_is_no_value(by: Any) -> None:
    assert opsmith.check(AgainstAnArray, samples=[(X, by)], only=["forward", "gradient"]).passed


class Vast(torch.autograd.Function):
    """It compares with a number that no float can be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: float, n: int) -> Tensor:
        if k > 10**400 or n == 10**400:
            return x * 3
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2, None, None


@pytest.mark.slow
def test_a_number_that_no_float_can_be_is_not_tried() -> None:
    report = opsmith.check(Vast, samples=[(X, 1.5, 3)], only=["forward", "gradient"])
    assert report.passed, str(report)
