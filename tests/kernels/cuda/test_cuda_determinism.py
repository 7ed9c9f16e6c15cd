"""CUDA kernels that add floating-point numbers in no fixed order, and are declared so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_driver import forget, on_cpu, record
from torch import Tensor

import opsmith
from opsmith import errors

ATOMIC = """
template <class T>
__global__ void added(Contiguous<const T> x, View<T, 0> y) {
  OPSMITH_EACH(i, x.numel()) atomicAdd(y.data, x[i]);  // sum
}
"""
SHARED = """
template <class T>
__global__ void added(Contiguous<const T> x, View<T, 0> y) {
  __shared__ T sum;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  OPSMITH_EACH(i, x.numel()) atomicAdd(&sum, x[i]);
  __syncthreads();
  if (threadIdx.x == 0 && blockIdx.x == 0) *y.data = sum;
}
"""
PAIR = ATOMIC.replace("x.numel()", "x.numel() < 2 ? x.numel() : 2")
COUNTED = """
template <class T>
__global__ void added(Contiguous<const T> x, View<T, 0> y, View<int, 0> arrived) {
  OPSMITH_EACH(i, x.numel()) atomicAdd(arrived.data, 1);
  __syncthreads();
  if (threadIdx.x) return;
  T sum = 0;
  for (int64_t i = 0; i < x.numel(); i++) sum += x[i];
  *y.data = sum;
}
"""
ALONE = """
template <class T>
__global__ void added(Contiguous<const T> x, View<T, 0> y) {
  if (threadIdx.x == 0) for (int64_t i = 0; i < x.numel(); i++) atomicAdd(y.data, x[i]);
}
"""
DECLARED = "declare `deterministic=False` in `op.kernel(...)`"


def added(name: str, text: str = ATOMIC, **options: Any) -> Any:
    def reference(x: Tensor) -> Tensor:
        return x.sum()

    operator = opsmith.operator(f"cuda_determinism::{name}")(reference)
    options = {"grid": 1, "block": 32, "initial": {"result": 0}, "dtypes": [torch.float32], **options}
    return operator.kernel("cuda", cuda=text, entry="added", **options)


def notes(operator: Any, size: int = 40) -> list[str]:
    operator.samples(lambda make: [(make(size),)])
    report = opsmith.check(operator, only=["cuda"], effort="quick")
    (outcome,) = [each for each in report.outcomes if each.property == "cuda"]
    assert outcome.status == "passed", str(report)
    return [each for each in outcome.notes if "no fixed order" in each]


@pytest.mark.slow
def test_a_sum_in_no_fixed_order_is_noted() -> None:
    (note,) = notes(added("noted"))
    assert note.startswith(
        "several threads add floating-point numbers to one element of `result` in no fixed order, and each "
        f"order rounds differently, at {__file__}:"
    )
    assert note.endswith(DECLARED)


@pytest.mark.slow
def test_so_is_one_in_shared_memory() -> None:
    (note,) = notes(added("shared", SHARED))
    assert "one element of shared memory in no fixed order" in note


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("text", "size", "options"),
    [
        (ATOMIC, 40, {"deterministic": False}),
        (PAIR, 2, {}),
        (ALONE, 40, {}),
        (COUNTED, 40, {"scratch": {"arrived": (torch.int32,)}, "initial": {"arrived": 0}}),
    ],
    ids=["declared", "two-terms", "one-thread", "whole-numbers"],
)
def test_what_is_not_noted(text: str, size: int, options: dict[str, Any]) -> None:
    assert notes(added("quiet", text, **options), size) == []


@pytest.fixture
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    forget()


REFUSED = (
    "it is declared with `deterministic=False`, and torch.use_deterministic_algorithms(True) is in force"
)


@pytest.mark.usefixtures("_deterministic")
def test_the_reference_computes_where_torch_must_be_deterministic() -> None:
    operator = added("refused", deterministic=False)
    on_cpu(operator)
    x = torch.ones(5)
    forget()
    assert operator(x) == 5
    assert operator(x) == 5
    assert record().launches == 0
    assert operator.explain(x).rejected[0].endswith(REFUSED)
    torch.use_deterministic_algorithms(False)
    for launches in (1, 2):
        assert operator(x) == 0  # the driver runs nothing
        assert record().launches == launches
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert operator(x) == 5
    assert record().launches == 2


@pytest.mark.usefixtures("_deterministic")
def test_a_strict_kernel_is_an_error_then() -> None:
    operator = added("strict", deterministic=False, strict=True)
    on_cpu(operator)
    with pytest.raises(
        errors.KernelRefusedError, match="its kernel for cpu does not take the call: it is declared"
    ):
        operator(torch.ones(5))


@pytest.mark.usefixtures("_deterministic")
def test_an_emulated_kernel_takes_no_call_either() -> None:
    operator = added("emulated", deterministic=False)
    with opsmith.testing.emulated_cuda() as calls:
        assert operator(torch.ones(5)) == 5
        assert calls.calls == {}
        torch.use_deterministic_algorithms(False)
        assert operator(torch.ones(5)) == 5
        assert calls.calls == {operator.name: 1}


def test_a_word_for_it_that_is_none() -> None:
    with pytest.raises(errors.UsageError) as caught:
        added("wrong", deterministic="no")
    assert caught.value.message().splitlines() == [
        "cuda_determinism::wrong: `deterministic=` of a kernel must be True or False",
        "  argument: deterministic",
        "  expected: True, or False if the kernel's rounding differs from run to run",
        "  got: 'no'",
        "  hint: leave `deterministic=` out for a kernel that adds in a fixed order",
    ]
