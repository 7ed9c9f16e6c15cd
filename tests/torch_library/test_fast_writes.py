"""Calls in place that bypass the dispatcher do what the slow ones do, and refuse what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith import errors
from opsmith.torch_library.in_place import InPlaceRegistration

VIEW = """
template <class T> void {name}(View<T, 2> x, View<const T, 2> y) {{
  for (int64_t i = 0; i < x.size(0); i++)
    for (int64_t j = 0; j < x.size(1); j++) x(i, j) = 2 * x(i, j) + y(i, j);
}}
"""
CONTIGUOUS = """
template <class T> void {name}(Contiguous<T> x, Contiguous<const T> y) {{
  for (int64_t i = 0; i < x.numel(); i++) x[i] = 2 * x[i] + y[i];
}}
"""


def double(x: Tensor, y: Tensor) -> None:
    """x <- 2 x + y.  x, y [...]."""
    x.mul_(2).add_(y)


def double_(x: Tensor, y: Tensor) -> Tensor:
    """x <- 2 x + y, and return x.  x, y [...]."""
    return x.mul_(2).add_(y)


def in_numpy(x: Tensor, y: Tensor) -> None:
    """Write past torch, which does not see it."""
    x.numpy()[...] = 2 * x.numpy() + y.numpy()


def made(kind: str) -> Any:
    name = kind.replace("-", "_")
    if kind.startswith("returned"):
        operator = opsmith.operator(f"fast_writes::{name}", mutates=["x"], returns="x")(double_)
    else:
        operator = opsmith.operator(f"fast_writes::{name}", mutates=["x"])(double)
    if "view" in kind:
        operator.kernel("cpu", cpp=VIEW.format(name=name), entry=name)
    if "contiguous" in kind:
        operator.kernel("cpu", cpp=CONTIGUOUS.format(name=name), entry=name)
    if "numpy" in kind:
        operator.kernel("cpu", in_numpy)
    return operator


KINDS = ["reference", "returned", "numpy", "returned-numpy", "view", "returned-view", "contiguous"]


@pytest.fixture(params=KINDS)
def operator(request: pytest.FixtureRequest) -> Any:
    operator = made(request.param)
    for dims in ((3,), (3, 4)):
        for _ in range(2):
            operator(torch.zeros(dims), torch.zeros(dims))
    return operator


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the operators whose calls took the slow path."""
    calls: list[str] = []
    values = InPlaceRegistration._values

    def recorded(self: InPlaceRegistration, *args: Any) -> list[Any]:
        calls.append(self.specification.name)
        return values(self, *args)

    monkeypatch.setattr(InPlaceRegistration, "_values", recorded)
    return calls


def test_values_versions_and_what_is_returned(operator: Any, slow: list[str]) -> None:
    for x in (torch.arange(3.0), torch.arange(12.0).view(3, 4), torch.arange(24.0).view(2, 3, 4)[1]):
        expected, version = 2 * x + 1, x._version
        found = operator(x, torch.ones_like(x))
        assert_close(x, expected)
        assert found is (x if operator.specification.schema.returns else None)
        assert x._version > version
    assert slow == []


def test_modes(operator: Any, slow: list[str]) -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for x in (torch.ones(3), torch.ones(3, 4)):
                for value in (3.0, 7.0):
                    operator(x, torch.ones_like(x))
                    assert_close(x, torch.full_like(x, value))
    parameter = torch.nn.Parameter(torch.ones(3))
    with torch.no_grad():
        for _ in range(2):
            operator(parameter, torch.ones(3))
    assert_close(parameter.detach(), torch.full((3,), 7.0))


def test_any_layout(operator: Any) -> None:
    for view in (
        lambda base: base.T,
        lambda base: base[:, ::2],
        lambda base: base[1:2, 1:],
        lambda base: base[:0],
    ):
        for _ in range(2):
            base = torch.arange(24.0).view(4, 6)
            right = base.clone()
            double(view(right), torch.ones_like(view(right)))
            operator(view(base), torch.ones_like(view(base)))
            assert_close(base, right, rtol=0, atol=0)


def test_interleaved_views(operator: Any) -> None:
    kv = torch.zeros(3, 2)
    for _ in range(2):
        operator(*kv.unbind(1))
    assert_close(kv, torch.zeros(3, 2))


def negated(x: Tensor) -> Tensor:
    return torch.complex(x, x).conj().imag


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (lambda x: (x, x), "shares elements with `y`"),
        (lambda x: (x[:2], x[1:]), "shares elements with `y`"),
        (lambda x: (x[:1].expand(3), torch.ones(3)), "several elements of `x` share the same memory"),
        (lambda x: (x.clone().requires_grad_(), torch.ones(3)), "`x` is a leaf that requires a gradient"),
        (lambda x: (x.clone().requires_grad_()[:], torch.ones(3)), "`x` is a view of a leaf"),
        (lambda x: (negated(x), torch.ones(3)), "`x` is a negated view"),
    ],
    ids=["itself", "a-part", "expanded", "leaf", "view-of-a-leaf", "negated"],
)
def test_what_is_refused(
    operator: Any, arguments: Callable[[Tensor], tuple[Tensor, Tensor]], said: str
) -> None:
    x = torch.arange(3.0)
    for _ in range(2):
        with pytest.raises(errors.MutationError, match=said):
            operator(*arguments(x))
    assert_close(x, torch.arange(3.0))


def test_a_tensor_of_inference_mode_outside_of_it(operator: Any) -> None:
    with torch.inference_mode():
        x = torch.ones(3)
        operator(x, torch.ones(3))
    for _ in range(2):
        with pytest.raises(errors.MutationError, match="`x` was made in inference mode"):
            operator(x, torch.ones(3))
    assert_close(x.clone(), torch.full((3,), 3.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32])
def test_other_dtypes(operator: Any, dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and "numpy" in operator.name:
        with pytest.raises(TypeError, match="BFloat16"):
            operator(torch.ones(3, dtype=dtype), torch.ones(3, dtype=dtype))
        return
    x = torch.ones(3, dtype=dtype)
    for value in (3, 7):
        operator(x, torch.ones(3, dtype=dtype))
        assert_close(x, torch.full((3,), value, dtype=dtype))


def test_through_torch_s_library(slow: list[str]) -> None:
    """A call of an operator that returns nothing takes the fast path there, too."""
    operator = made("reference")
    for _ in range(2):
        torch.ops.fast_writes.reference(torch.ones(3), torch.ones(3))
    slow.clear()
    x = torch.ones(3)
    assert torch.ops.fast_writes.reference(x, torch.ones(3)) is None
    assert torch.ops.fast_writes.reference.default(x, torch.ones(3)) is None
    assert_close(x, torch.full((3,), 7.0))
    assert slow == []
    assert operator.torch_operator is torch.ops.fast_writes.reference.default


def test_a_declared_write_that_never_happens(slow: list[str]) -> None:
    """Code that is proved to write into nothing is not taken for an operator that is declared so."""

    @opsmith.operator("fast_writes::of_a_name", mutates=["x"])
    def of_a_name(x: Tensor, y: Tensor) -> None:
        x = 2 * x + y

    @opsmith.operator("fast_writes::result_alone", mutates=["x"])
    def result_alone(x: Tensor, y: Tensor) -> Tensor:
        return 2 * x + y

    @opsmith.operator("fast_writes::itself", mutates=["x"], returns="x")
    def itself(x: Tensor, y: Tensor) -> Tensor:
        return x

    x, y = torch.zeros(3), torch.ones(3)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for at in range(3):
            if at:
                slow.clear()
            with mode():
                assert of_a_name(x, y) is None
                assert_close(result_alone(x, y), y)
                assert itself(x, y) is x
            assert_close(x, torch.zeros(3))
        assert slow == []


def test_another_tensor_is_returned_in_a_later_call() -> None:
    @opsmith.operator("fast_writes::other_", mutates=["x"], returns="x")
    def other_(x: Tensor, copied: bool = False) -> Tensor:
        x.add_(1)
        return x.clone() if copied else x.view_as(x)

    x = torch.zeros(3)
    for _ in range(3):
        assert other_(x) is x
    with pytest.raises(errors.AliasError, match="it did not return `x`"):
        other_(x, copied=True)


def test_results_beside_what_is_written(slow: list[str]) -> None:
    @opsmith.operator("fast_writes::summed", mutates=["x"])
    def summed(x: Tensor, y: Tensor | None = None, alias: bool = False) -> Tensor:
        x.add_(1 if y is None else y)
        return x[:1] if alias else x.sum()

    x = torch.zeros(3)
    for _ in range(2):
        summed(x)
        summed(x, torch.ones(3))
    slow.clear()
    assert_close(summed(x), torch.tensor(15.0))
    assert_close(summed(x, torch.ones(3)), torch.tensor(18.0))
    assert slow == []
    with pytest.raises(errors.AliasError, match="shares memory with its input `x`"):
        summed(x, alias=True)


@pytest.mark.slow
def test_the_kernel_that_takes_the_layout_runs() -> None:
    """The guard does not see strides: a call in another layout must not fix the choice."""
    ran: list[str] = []
    operator = opsmith.operator("fast_writes::layouts", mutates=["x"])(double)
    operator.kernel("cpu", lambda x, y: (ran.append("next"), double(x, y))[1])
    operator.kernel("cpu", cpp=CONTIGUOUS.format(name="layouts"))
    strided, whole = torch.zeros(4, 3).T, torch.zeros(3, 4)
    for x in (strided, whole, strided, whole):
        operator(x, torch.ones(3, 4))
    assert ran == ["next", "next"]
    assert_close(strided, whole)
