"""The tour's report of what computed: a kernel, or the reference and why."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith.ops import involution
from opsmith.tour.operators import implementation_of, involution_implementations


@opsmith.operator("tests_tour_computed::plain")
def plain(x: Tensor) -> Tensor:
    return 3 * x


@opsmith.operator("tests_tour_computed::helped")
def helped(x: Tensor) -> Tensor:
    return 2 * x


@helped.kernel("cpu", dtypes=[torch.float32])
def by_adding(x: Tensor) -> Tensor:
    return x + x


def test_kernels_and_references_are_told_apart() -> None:
    kernel = implementation_of(helped, torch.ones(2))
    assert kernel.startswith("kernel for cpu, ")
    assert kernel == helped.explain(torch.ones(2)).forward
    explanation = helped.explain(torch.ones(2).double())
    (reason,) = explanation.rejected
    assert "it does not take torch.float64" in reason
    assert implementation_of(helped, torch.ones(2).double()) == f"{explanation.forward} ({reason})"
    expected = f"{plain.explain(torch.ones(2)).forward} (there is no kernel for it)"
    assert implementation_of(plain, torch.ones(2)) == expected


def test_each_way_is_told_once_and_only_what_has_run() -> None:
    x, weight = torch.rand(1, 2, 3, 3), torch.rand(1, 1, 3, 3, 3, 3)
    forward, *gradients = involution_implementations(
        lambda: [involution(x, weight, 1, 1) for _ in range(2)]
    ).values()
    assert forward == [implementation_of(involution, x, weight, 1, 1)]
    assert gradients == [[], []]


@pytest.mark.parametrize("needed", ["input", "weight"])
def test_only_the_gradients_that_are_computed_are_told(needed: str) -> None:
    x, weight = torch.rand(1, 2, 5, 4), torch.rand(1, 1, 3, 3, 3, 2)
    (x if needed == "input" else weight).requires_grad_()
    ways = involution_implementations(lambda: involution(x, weight, 2, 1).sum().backward())
    assert [len(each) for each in ways.values()] == [1, needed == "input", needed == "weight"]
