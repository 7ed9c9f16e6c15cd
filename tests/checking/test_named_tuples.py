"""Named tuples as arguments, in a reference and in a class: they are handed on and resized as such."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith


class Window(NamedTuple):
    low: int
    high: int


class Scale(NamedTuple):
    by: int
    offset: float = 2.0


class Size(NamedTuple):
    height: int
    width: int


class Pair(NamedTuple):
    low: Tensor
    high: Tensor


FIRST = Window(0, 2)


@opsmith.operator("named_tuples::cut")
def cut(x: Tensor, window: Window = FIRST) -> Tensor:
    return x[window.low : window.high].clone()


cut.samples(lambda make: [(make(3),), (make(5), Window(1, 3))])


@opsmith.operator("named_tuples::scaled")
def scaled(x: Tensor, scale: Scale) -> Tensor:
    return x * scale.by + scale.offset


scaled.samples(lambda make: [(make(3, 4), Scale(2, 3.0))])


@opsmith.operator("named_tuples::grid")
def grid(x: Tensor, size: Size) -> Tensor:
    return x.reshape(-1, size.height, size.width) * 2


grid.samples(lambda make: [(make(2, 3, 5), Size(3, 5)), (make(1, 4, 2), Size(4, 2))])


@pytest.mark.every(8)
@pytest.mark.parametrize("operator", [cut, scaled, grid], ids=lambda operator: operator.name)
def test_one_as_an_argument_is_no_fault(operator: opsmith.Operator[..., Any]) -> None:
    report = opsmith.check(operator, skip=["compile"])
    assert not report.errors, report
    assert not [each for each in report.failures if each.property == "export"], report
    assert report.passed_as_asked, report


@opsmith.operator("named_tuples::bands")
def bands(x: Tensor) -> Tensor:
    return torch.stack(Pair(x.sin(), x.cos())).sum(0) * x


bands.samples(lambda make: [(make(3, 4),)])
bands.gradients(x=lambda grad, x: grad * (x.sin() + x.cos()))


def test_a_term_that_flows_through_one_is_named() -> None:
    (failure,) = opsmith.check(bands, only=["gradient"]).failures
    assert failure.cause == "missing-term"
    assert "torch.stack(Pair(" in failure.message


class Affine(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pair: Pair) -> Tensor:
        ctx.save_for_backward(x, *pair)
        return x * pair.low + pair.high

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[1], None


def test_one_of_tensors_reaches_the_forward_of_a_class_that_was_never_called() -> None:
    affine = opsmith.adopt(Affine, "named_tuples::affine")
    pair = Pair(torch.full((3,), 2.0), torch.ones(3))
    report = opsmith.check(affine, samples=[(torch.rand(3), pair)], only=["forward", "fake", "memory"])
    assert not report.errors, report
