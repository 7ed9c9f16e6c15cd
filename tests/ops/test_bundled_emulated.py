"""CUDA kernels of bundled operators, run on the CPU with every access checked: no finding, right results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from language_model_cases import CALLS, LAYOUTS, REAL, Layout, calls, expected, results
from random_layouts import contiguous
from torch.testing import assert_close

import opsmith
from opsmith import errors
from opsmith.kernels.cuda.emulation.call import EmulatedCall, KernelEmulation
from opsmith.kernels.cuda.emulation.launch import ORDERS, Order
from opsmith.kernels.cuda.kernel import cuda_kernels
from opsmith.ops import adamw_, add_rms_norm_, rms_norm, rope_, rope_table, write_kv_cache
from opsmith.ops.rms_norm import rms_norm_backward

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kernels are emulated on Linux")


@cache
def emulation(operator: opsmith.Operator[..., Any]) -> KernelEmulation:
    """The kernel, with the instances for all dtypes in one library."""
    (kernel,) = cuda_kernels(operator.specification)
    found = KernelEmulation(kernel)
    found.build([given for dtype in REAL for given in calls(operator, dtype, contiguous)])
    return found


MATRIX = [
    pytest.param(
        operator,
        dtype,
        layout,
        (ORDERS[i], ORDERS[i - 1]) if i == j else ORDERS,
        id=f"{operator.specification.short_name}-{str(dtype)[6:]}-{layout.__name__}",
        marks=[] if i == j else [pytest.mark.slow],
    )
    for operator in CALLS
    for i, dtype in enumerate(REAL)
    for j, layout in enumerate(LAYOUTS)
]


@pytest.mark.every(8)
@pytest.mark.parametrize(("operator", "dtype", "layout", "orders"), MATRIX)
def test_values_without_a_finding(
    operator: Any, dtype: torch.dtype, layout: Layout, orders: Sequence[str]
) -> None:
    kernel = emulation(operator)
    launched = []
    for given in calls(operator, dtype, layout):
        right = expected(operator, given)
        call = kernel.prepare(list(given))
        assert isinstance(call, EmulatedCall), call
        assert not call.call.plan.copied
        launched.append((given, right, call, [call.new_run(Order(order)) for order in orders]))
    every = [launch for *_, launches in launched for launch in launches]
    assert [found for found in kernel.run(every) if found] == []
    for given, right, call, launches in launched:
        for launch in launches:
            assert_close(results(operator, call.finish(kernel.kernel, launch), given), right, equal_nan=True)


@pytest.mark.slow
@pytest.mark.every(4)
@pytest.mark.parametrize("odd", [float("inf"), float("nan")], ids=str)
def test_what_is_not_finite_goes_where_the_reference_has_it(odd: float) -> None:
    x, weight = torch.randn(5, 8), torch.randn(8)
    x[1, 3] = x[4, 0] = odd
    right = rms_norm.reference(x, weight)
    assert_close(opsmith.emulate(rms_norm, x, weight), right[0], equal_nan=True)
    given = torch.randn(5, 8), x, weight, right[1]
    got, right = opsmith.emulate(rms_norm_backward, *given), rms_norm_backward.reference(*given)
    assert_close(got, right, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "operator",
    [
        pytest.param(rms_norm, id="rms_norm"),
        pytest.param(add_rms_norm_.functional, id="add_rms_norm_", marks=pytest.mark.slow),
    ],
)
def test_gradients(operator: Callable[..., Any]) -> None:
    sizes = [(3, 5), (5,)] if operator is rms_norm else [(3, 5), (3, 5), (5,)]
    given = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]
    with opsmith.testing.emulated_cuda() as emulated:
        assert torch.autograd.gradcheck(operator, given, fast_mode=True, check_undefined_grad=False)
    forward = "opsmith::rms_norm" if operator is rms_norm else "opsmith::add_rms_norm_"
    assert emulated.calls[forward]
    assert emulated.calls["opsmith::rms_norm_backward"]
    assert emulated.refused == {}


@pytest.mark.slow
def test_a_slot_beyond_the_cache_stops_the_kernel() -> None:
    caches, rows = [torch.zeros(5, 4, 2, 3) for _ in range(2)], torch.ones(2, 2, 3)
    with pytest.raises(errors.KernelFaultError, match=r"assert\(slot < key_cache.size\(0\)"):
        opsmith.emulate(write_kv_cache, *caches, rows, rows, torch.tensor([20, 0]))


@pytest.mark.every(5)
@pytest.mark.parametrize("position", [-1, 3])
def test_a_position_beyond_the_table_stops_the_kernel(position: int) -> None:
    kernel, positions = emulation(rope_), torch.tensor([0, 1])
    call = kernel.prepare([torch.ones(2, 1, 4), rope_table(3, 4), positions, False])
    assert isinstance(call, EmulatedCall), call
    positions[1] = position  # as in a later call: the reference saw the numbers of the first
    [[found, *_]] = kernel.run([call.new_run(Order("forward"))])
    assert "assert(position >= 0 && position < cos_sin.size(0))" in found.message


@pytest.mark.parametrize("columns", [3, 6])
def test_a_table_that_does_not_fit_is_refused_before_the_launch(columns: int) -> None:
    message = f"cos_sin has {columns} columns: an even number is needed, of at most 4"
    with pytest.raises(ValueError, match=message):
        opsmith.emulate(rope_, torch.ones(2, 1, 4), torch.ones(3, columns), torch.tensor([0, 1]))


@pytest.mark.slow
def test_more_tensors_than_a_launch_takes_are_left_to_the_next_kernel() -> None:
    four = [[torch.ones(2) for _ in range(51)] for _ in range(4)]
    refused = emulation(adamw_).prepare([*four, torch.tensor(0.0), 0.1, 0.9, 0.99, 1e-8, 0.0])
    assert refused == "`parameters` has 51 items, and `List<View<float32>, 50>` has room for 50"


def spilling(operator: opsmith.Operator[..., Any]) -> list[str]:
    """Failures of the property `resources`."""
    report = opsmith.check(operator, only=["resources"], effort="quick")
    [outcome] = [each for each in report.outcomes if each.property == "resources"]
    assert outcome.status == "passed", outcome
    return [each.message for each in report.failures if each.property == "resources"]


@pytest.mark.parametrize(
    "operator",
    [pytest.param(each, marks=[] if each is write_kv_cache else [pytest.mark.slow]) for each in CALLS],
    ids=lambda each: each.specification.short_name,
)
def test_nothing_spills(operator: opsmith.Operator[..., Any]) -> None:
    assert spilling(operator) == []
