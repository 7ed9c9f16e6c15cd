"""Calls with several results, hidden ones too, bypass the dispatcher where a kernel in C++ computes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith import errors
from opsmith.torch_library.registration import DispatcherRegistration

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


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the operators whose calls took the slow path."""
    calls: list[str] = []
    values = DispatcherRegistration._values

    def recorded(self: DispatcherRegistration, *args: Any) -> list[Any]:
        calls.append(self.specification.name)
        return values(self, *args)

    monkeypatch.setattr(DispatcherRegistration, "_values", recorded)
    return calls


def expected(operator: Any, *args: Any) -> Any:
    total, product = both(*args)
    return total if operator.specification.schema.hidden else (total, product)


@pytest.mark.parametrize("given", [True, False])
def test_values(operator: Any, slow: list[str], given: bool) -> None:
    for stride in (1, 2):
        x, y = torch.randn(5 * stride)[::stride], torch.randn(5) if given else None
        found = operator(x, y)
        assert type(found) is type(expected(operator, x, y))
        assert_close(found, expected(operator, x, y))
        operator.torch_operator(x, y)
    assert not slow


def test_modes(operator: Any, slow: list[str]) -> None:
    x, y = torch.randn(4, requires_grad=True), torch.randn(4)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            for _ in range(2):
                assert_close(operator(x, y), expected(operator, x, y))
    with torch.inference_mode():
        made_there = torch.randn(4)
        for _ in range(2):
            assert_close(operator(made_there, y), expected(operator, made_there, y))
    assert not slow


def test_gradients_take_the_slow_path(operator: Any, slow: list[str]) -> None:
    x, y = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(operator, (x, y))
    assert slow
    slow.clear()
    with torch.no_grad():
        operator(x, y)
        assert slow == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_other_dtypes(operator: Any, dtype: torch.dtype) -> None:
    x, y = torch.arange(4).to(dtype), torch.arange(4).to(dtype)
    for _ in range(2):
        assert_close(operator(x, y), expected(operator, x, y))


def test_modes_that_watch_see_the_call(operator: Any) -> None:
    x, y = torch.randn(4), torch.randn(4)
    assert_close(torch.func.vmap(operator)(x[None], y[None]), expected(operator, x[None], y[None]))
    with torch.profiler.profile() as profile:
        operator(x, y)
    assert operator.name in {each.name for each in profile.events()}


def test_a_result_that_is_an_argument() -> None:
    operator = opsmith.operator("fast_results::alias")(both)
    operator.kernel("cpu", cpp=BOTH.format(name="alias"), entry="alias")
    x, y = torch.randn(3), torch.randn(3)
    for _ in range(3):
        assert_close(operator(x, y), both(x, y))
    for given in ((x, y, True), (x.int(), y.int(), True)):  # new to the kernel, and for the reference alone
        with pytest.raises(errors.AliasError):
            operator(*given)
