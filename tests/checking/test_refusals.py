"""Exceptions that are refusals of an operator, and those that merely read like one."""

from __future__ import annotations

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
from opsmith.checking.properties.torch.compiled_calls import refused
from opsmith.checking.properties.torch.mapping import refusal
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
    assert "'>' not supported between instances of 'NoneType' and 'int'" in found.unserved[0].raised[1]


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
