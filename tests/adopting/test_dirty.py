"""A class that marks arguments as dirty is adopted in place: it writes into the caller's tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dirty_classes import (
    CASES,
    LAYOUTS,
    Case,
    Doubles,
    Wholes,
    WritesSecond,
    every_case,
    numbers,
    observed,
)
from torch import Tensor
from torch.autograd import Function
from torch.testing import assert_close

import opsmith

WRONG_IN_VIEWS = [
    CASES[name] for name in ("with_sign", "with_total", "writes_two", "writes_second", "wholes")
]


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("case", "layout", "mode"),
    [
        pytest.param(case, layout, mode, id=f"{name}-{layout}-{mode}")
        for name, case in CASES.items()
        for layout in LAYOUTS
        for mode in ("recorded", "plain", "no_grad", "inference")
        if not (mode == "recorded" and layout != "contiguous" and case in WRONG_IN_VIEWS)
    ],
)
def test_as_apply(case: Case, layout: str, mode: str) -> None:
    operator = case.operator
    expected = observed(case.cls.apply, case, layout, mode)
    for _ in range(3):
        found = observed(operator, case, layout, mode)
        assert found.same == expected.same
        assert found.rose == expected.rose
        assert found.requires == expected.requires
        assert found.same_node == expected.same_node
        for field in ("arguments", "results", "gradients", "bases"):
            assert_close(getattr(found, field), getattr(expected, field), msg=field)


@pytest.mark.parametrize("case", WRONG_IN_VIEWS, ids=lambda case: case.cls.__name__)
def test_writes_into_views_are_right_where_apply_refuses_or_is_wrong(case: Case) -> None:
    """Torch allows one result, and loses gradients unless the view is the first tensor."""
    if case.cls is WritesSecond:
        wrong = observed(case.cls.apply, case, "at_an_offset", "recorded").gradients
        assert not torch.allclose(
            wrong[0], observed(case.cls.apply, case, "contiguous", "recorded").gradients[0]
        )
    elif case.cls is not Wholes:
        with pytest.raises(RuntimeError, match="cannot return more than one Tensor"):
            observed(case.cls.apply, case, "at_an_offset", "recorded")
    found = observed(case.operator, case, "at_an_offset", "recorded")
    expected = observed(case.operator, case, "contiguous", "recorded")
    for field in ("arguments", "results", "gradients", "same"):
        assert_close(getattr(found, field), getattr(expected, field))


@every_case
def test_the_schema_says_what_is_written(case: Case) -> None:
    operator = case.operator
    operator(*case.make())
    names = {"x": "Tensor(a!) x", "y": "Tensor(b!) y", "counts": "Tensor(a!) counts"}
    if case.written:
        written = [operator.specification.schema.names[at] for at in case.written]
        assert all(names[name] in str(operator) for name in written)
        assert [f"`{name}` is written in place: forward marks it as dirty" for name in written] == [
            note for note in operator.explain(*case.make()).notes if "in place" in note
        ]


class ReturnsTwice(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.mark_dirty(x)
        x.mul_(2)
        return x, x

    @staticmethod
    def backward(ctx: Any, one: Tensor, other: Tensor) -> Any:
        return 2 * one + 2 * other


def test_an_argument_that_is_returned_twice_is_a_copy_then() -> None:
    """Under `apply` the gradient of the first result is lost."""
    operator, leaf = opsmith.adopt(ReturnsTwice, "dirty::twice"), numbers(3).requires_grad_()
    for _ in range(2):
        x = leaf * 1
        one, other = operator(x)
        assert one is x
        assert other is not x
        assert_close(other, one)
        total = (3 * one + 5 * other).sum()
        assert_close(torch.autograd.grad(total, leaf)[0], torch.full((3,), 16.0).double())


@pytest.mark.slow
def test_one_that_returns_its_first_argument_does_so_in_torchs_library() -> None:
    operator, x = opsmith.adopt(Doubles, "dirty::in_torch"), numbers(3)
    assert str(operator) == "<opsmith operator dirty::in_torch(Tensor(a!) x) -> Tensor(a!)>"
    given = x.clone()
    assert torch.ops.dirty.in_torch(given) is given
    assert_close(given, 2 * x)
