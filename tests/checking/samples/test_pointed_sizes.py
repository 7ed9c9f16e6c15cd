"""Sizes that indices point into: derived samples without rows have no indices of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith.checking.effort import EFFORTS
from opsmith.checking.samples.variations import variations
from opsmith.checking.subject_kinds import subject_of

INDICES = torch.tensor([0, 2, 2])
PROPERTIES = ["forward", "linearity", "gradient", "layouts", "forward_mode", "second_order", "vmap"]


def kernel_that_checks(name: str, reference: Callable[..., Tensor], axis: int, error: type[Exception]) -> Any:
    """Declare an operator of `x` and `index` with a right kernel that refuses indices out of range."""
    operator = opsmith.operator(f"pointed::{name}")(reference)

    def kernel(x: Tensor, index: Tensor, *others: Any) -> Tensor:
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < x.shape[axis]:
            raise error(f"an index is not in 0..{x.shape[axis] - 1}")
        return reference(x, index, *others)

    operator.kernel("cpu", kernel)
    return operator


def add_rows(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    return x.index_add(0, index, rows)


def add_columns(x: Tensor, index: Tensor, by: Tensor) -> Tensor:
    return x.scatter_add(1, index[:, None], by[:, None])


def fill_planes(x: Tensor, index: Tensor, value: float) -> Tensor:
    return x.index_fill(2, index, value)


CASES: dict[str, tuple[Any, int, type[Exception], tuple[Any, ...]]] = {
    "rows, IndexError": (add_rows, 0, IndexError, (torch.randn(3, 2), INDICES, torch.randn(3, 2))),
    "columns, ValueError": (add_columns, 1, ValueError, (torch.randn(2, 5), INDICES[:2], torch.randn(2))),
    "planes, RuntimeError": (fill_planes, 2, RuntimeError, (torch.randn(2, 3, 4), INDICES, 0.5)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_that_checks_its_indices_is_not_accused(case: str) -> None:
    reference, axis, error, sample = CASES[case]
    operator = kernel_that_checks(f"{reference.__name__}_checked", reference, axis, error)
    report = opsmith.check(operator, samples=[sample], only=PROPERTIES, effort="quick")
    assert not report.failures, report


def test_no_rows_have_no_indices_and_other_sizes_are_empty_alone() -> None:
    operator = kernel_that_checks("shapes_seen", add_rows, 0, IndexError)
    samples = [CASES["rows, IndexError"][3], (torch.randn(4, 3), INDICES[:2], torch.randn(2, 3))]
    subject = subject_of(operator, samples, 0, EFFORTS["thorough"])
    seen = {tuple(tuple(each.shape) for each in sample.flat) for sample in variations(subject).samples}
    assert ((0, 2), (0,), (0, 2)) in seen
    assert ((3, 0), (3,), (3, 0)) in seen
    assert ((3, 2), (0,), (0, 2)) in seen
    assert all(shapes[0][0] or not shapes[1][0] for shapes in seen)


def test_whole_numbers_that_are_no_indices_stay_where_there_are_no_rows() -> None:
    @opsmith.operator("pointed::raised")
    def raised(x: Tensor, power: Tensor) -> Tensor:
        return x**power

    samples = [(torch.rand(3, 2) + 1, torch.tensor([1, 2])), (torch.rand(4, 2) + 1, torch.tensor([2, 0]))]
    subject = subject_of(raised, samples, 0, EFFORTS["thorough"])
    shapes = {tuple(tuple(each.shape) for each in sample.flat) for sample in variations(subject).samples}
    assert ((0, 2), (2,)) in shapes


@pytest.mark.parametrize("error", [IndexError, ValueError, RuntimeError])
def test_a_call_that_raises_without_elements_is_a_limit_in_each_property(error: type[Exception]) -> None:
    """The exception is of the forward, whatever the property asks for."""

    def kernel(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
        if not x.shape[0]:
            raise error("no rows")
        return add_rows(x, index, rows)

    operator = opsmith.operator(f"pointed::refuses_{error.__name__}")(add_rows)
    operator.kernel("cpu", kernel)
    sample = CASES["rows, IndexError"][3]
    report = opsmith.check(operator, samples=[sample], only=PROPERTIES, effort="quick")
    assert {each.severity for each in report.failures} == {"limit"}, report
    assert {each.cause for each in report.failures} == {"empty"}
    assert {"forward", "linearity", "gradient"} <= {each.property for each in report.failures}


def test_a_call_that_asks_no_indices_for_their_largest_is_a_limit() -> None:
    operator = opsmith.operator("pointed::largest")(add_rows)

    def kernel(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
        assert int(index.max()) < x.shape[0]
        return add_rows(x, index, rows)

    operator.kernel("cpu", kernel)
    sample = CASES["rows, IndexError"][3]
    report = opsmith.check(operator, samples=[sample], only=PROPERTIES, effort="quick")
    assert {(each.cause, each.severity) for each in report.failures} == {("empty", "limit")}, report


def test_a_backward_that_raises_without_elements_is_an_error_and_says_so() -> None:
    operator = opsmith.operator("pointed::backward")(add_rows)
    operator.gradients(x=lambda grad: grad + 0 * grad.amax(0), rows=lambda grad, index: grad[index])
    sample = CASES["rows, IndexError"][3]
    report = opsmith.check(operator, samples=[sample], only=["gradient"], effort="quick")
    assert ("empty", "error") in {(each.cause, each.severity) for each in report.failures}, report
    assert "the backward" in {each.evidence.get("raised in") for each in report.failures}
