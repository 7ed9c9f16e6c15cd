"""Calls with several results, hidden ones too, or with lists bypass the dispatcher for kernels in C++."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith import errors

BOTH = """
template <class T>
void {name}(View<const T, 1> x, std::optional<View<const T, 1>> y, bool same,
            View<T, 1> total, View<T, 1> product) {{
  for (int64_t i = 0; i < x.size(0); i++) {{
    const T other = y ? (*y)(i) : T(1);
    total(i) = x(i) + other;
    product(i) = x(i) * other;
  }}
}}
"""


def both(x: Tensor, y: Tensor | None = None, same: bool = False) -> tuple[Tensor, Tensor]:
    """x + y and x y.  x, y [N]."""
    other = torch.ones_like(x) if y is None else y
    return x if same else x + other, x * other


def made(kind: str) -> Any:
    hidden = ("product",) if kind == "hidden" else ()
    operator = opsmith.operator(f"fast_results::{kind}", results=("total", "product"), hidden=hidden)(both)
    return operator.kernel("cpu", cpp=BOTH.format(name=kind), entry=kind)


@pytest.fixture(params=["visible", "hidden"])
def operator(request: pytest.FixtureRequest) -> Any:
    operator = made(request.param)
    for y in (torch.ones(3), None):
        for _ in range(2):
            operator(torch.zeros(3), y)
    return operator


def expected(operator: Any, *args: Any) -> Any:
    total, product = both(*args)
    return total if operator.specification.schema.hidden else (total, product)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_other_dtypes(operator: Any, dtype: torch.dtype) -> None:
    x, y = torch.arange(4).to(dtype), torch.arange(4).to(dtype)
    for _ in range(2):
        assert_close(operator(x, y), expected(operator, x, y))


SUM = """
template <class T>
void {name}(List<View<const T, 1>> xs, std::optional<View<const T, 1>> y, View<T, 1> total) {{
  for (int64_t i = 0; i < total.size(0); i++) {{
    total(i) = y ? (*y)(i) : T(0);
    for (const auto& x : xs) total(i) += x(i);
  }}
}}
"""
ADD = """
template <class T>
void {name}(List<View<T, 1>> totals, List<View<const T, 1>> xs) {{
  OPSMITH_CHECK(totals.size == xs.size, "the lists differ in length");
  for (int64_t at = 0; at < totals.size; at++)
    for (int64_t i = 0; i < totals[at].size(0); i++) totals[at](i) += xs[at](i);
}}
"""


def summed(xs: list[Tensor], y: Tensor | None = None) -> Tensor:
    """The sum of some vectors.  xs [N] each, y [N] -> [N]."""
    return sum(xs, torch.zeros_like(xs[0]) if y is None else y)


def add_each(totals: list[Tensor], xs: list[Tensor]) -> None:
    """totals <- totals + xs, one by one."""
    for total, x in zip(totals, xs, strict=True):
        total.add_(x)


@pytest.fixture
def sums() -> Any:
    operator = opsmith.operator("fast_results::sums")(summed)
    operator.kernel("cpu", cpp=SUM.format(name="sums"), entry="sums")
    for count in (1, 3):
        for y in (torch.ones(2), None):
            for _ in range(2):
                operator([torch.ones(2) for _ in range(count)], y)
    return operator


@pytest.fixture
def adds() -> Any:
    operator = opsmith.operator("fast_results::adds", mutates=["totals"])(add_each)
    operator.kernel("cpu", cpp=ADD.format(name="adds"), entry="adds")
    for _ in range(2):
        operator([torch.ones(2), torch.ones(3)], [torch.ones(2), torch.ones(3)])
    return operator


def test_lists_of_other_lengths_dtypes_and_tensors(sums: Any) -> None:
    x = torch.randn(4)
    for xs in ([x] * 2, [torch.randn(4) for _ in range(5)], [x.double(), x.double()], [x[::2], x[1::2]]):
        for _ in range(3):
            assert_close(sums(xs), summed(xs))
    with pytest.raises(errors.OpsmithError, match="xs"):
        sums([x, 3])
    with pytest.raises(errors.LayoutError):
        sums([x, x.to_sparse()])


def test_lists_that_cannot_be_written(adds: Any) -> None:
    x = torch.ones(2)
    for _ in range(2):
        with pytest.raises(errors.MutationError, match="shares elements"):
            adds([x, x], [torch.ones(2), torch.ones(2)])
        with pytest.raises(errors.MutationError, match=r"`totals\[1\]` is a leaf"):
            adds([x, torch.ones(3, requires_grad=True)], [torch.ones(2), torch.ones(3)])
        with pytest.raises(errors.MutationError, match="several elements"):
            adds([x, torch.ones(1).expand(3)], [torch.ones(2), torch.ones(3)])
    assert_close(x, torch.ones(2))
