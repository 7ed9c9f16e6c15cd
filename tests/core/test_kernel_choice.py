"""Kernels: by device and dtype, the newest first; what none takes runs the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith.core.kernels import Accepted, Kernel, Rejected, choose

Operator = opsmith.Operator[..., Any]


def scaled(x: Tensor, by: float = 2.0) -> Tensor:
    return x * by


def marked(mark: float) -> Any:
    return lambda x, by: torch.full_like(x, mark)


@pytest.fixture
def operator(name: str) -> Operator:
    return opsmith.operator(name)(scaled)


def test_kernel_runs_in_place_of_the_reference(operator: Operator) -> None:
    operator.kernel("cpu", marked(7.0))
    assert_close(operator(torch.ones(2)), torch.full((2,), 7.0))
    with torch.no_grad():
        assert_close(operator(torch.ones(2, requires_grad=True)), torch.full((2,), 7.0))


def test_kernel_runs_under_autograd(operator: Operator) -> None:
    operator.kernel("cpu", marked(7.0))
    x = torch.ones(2, requires_grad=True)
    result = operator(x)
    assert_close(result.detach(), torch.full((2,), 7.0))
    result.sum().backward()
    assert_close(x.grad, torch.full((2,), 2.0))  # derived from the reference, which defines the answer


def test_kernel_of_another_device_is_passed_over(operator: Operator) -> None:
    operator.kernel("cuda", marked(7.0))
    assert_close(operator(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.float32, 7.0), (torch.float64, 2.0), (torch.float16, 2.0)]
)
def test_dtypes(operator: Operator, dtype: torch.dtype, expected: float) -> None:
    operator.kernel("cpu", marked(7.0), dtypes={torch.float32})
    assert_close(operator(torch.ones(2, dtype=dtype)), torch.full((2,), expected, dtype=dtype))


def test_newest_kernel_that_takes_the_call_runs(operator: Operator) -> None:
    operator.kernel("cpu", marked(1.0))
    operator.kernel("cpu", marked(2.0), dtypes=[torch.float64])
    assert operator(torch.ones(1)).item() == 1.0
    assert operator(torch.ones(1, dtype=torch.float64)).item() == 2.0


def test_kernel_for_the_same_replaces(operator: Operator) -> None:
    operator.kernel("cpu", marked(1.0))
    operator.kernel("cpu", marked(2.0))
    assert operator(torch.ones(1)).item() == 2.0
    assert len(operator.specification.kernels) == 1


def test_decorator(operator: Operator) -> None:
    @operator.kernel("cpu", dtypes=[torch.float32])
    def mine(x: Tensor, by: float) -> Tensor:
        return torch.full_like(x, by * 10)

    assert operator(torch.ones(1), 3.0).item() == 30.0
    assert_close(mine(torch.ones(1), 1.0), torch.full((1,), 10.0))


def test_kernel_gets_defaults_and_keywords_as_the_reference_does(name: str) -> None:
    def reference(x: Tensor, size: int | tuple[int, int] = 1, *, mode: str = "a") -> Tensor:
        return x * 1

    seen: list[Any] = []

    def kernel(x: Tensor, size: tuple[int, int], *, mode: str) -> Tensor:
        seen.append((size, mode))
        return x * 1

    operator = opsmith.operator(name)(reference).kernel("cpu", kernel)
    operator(torch.ones(1))
    operator(torch.ones(1), 3, mode="b")
    assert seen == [((1, 1), "a"), ((3, 3), "b")]


def test_kernels_are_not_run_on_fake_or_meta_tensors(operator: Operator) -> None:
    from torch._subclasses import FakeTensorMode

    def kernel(x: Tensor, by: float) -> Tensor:
        raise AssertionError("the kernel ran")

    operator.kernel("cpu", kernel)
    with FakeTensorMode() as mode:
        assert operator(mode.from_tensor(torch.ones(3))).shape == (3,)
    assert operator(torch.ones(3, device="meta")).shape == (3,)


def test_choosing_returns_a_verdict_for_each() -> None:
    narrow = Kernel("cpu", scaled, frozenset({torch.float64}))
    other, wide = Kernel("cuda", scaled), Kernel("cpu", scaled)
    accepted, rejected = choose((narrow, other, wide), [torch.ones(2)])
    assert accepted == Accepted(wide)
    assert rejected == (
        Rejected(narrow, "it does not take torch.float32"),
        Rejected(other, "a tensor is on cpu", elsewhere=True),
    )
    assert choose((narrow,), [torch.ones(2)])[0] is None
    assert choose((), [torch.ones(2)]) == (None, ())


def test_every_tensor_counts(name: str) -> None:
    def total(xs: list[Tensor], y: Tensor | None = None) -> Tensor:
        return torch.stack(xs).sum(0)

    operator = opsmith.operator(name)(total).kernel("cpu", lambda xs, y: xs[0] * 100, dtypes=[torch.float32])
    one, wide = torch.ones(1), torch.ones(1, dtype=torch.float64)
    assert operator([one, one]).item() == 100.0
    assert operator([one, wide.float()], None).item() == 100.0
    assert operator([one, one], wide).item() == 2.0
