"""Launches by plans: a GPU gets each byte of each parameter as Python lays it out for the emulation."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cuda_operators import scaled
from fake_driver import ARCHITECTURE, ON_LAUNCH, OnCpu, driver_library, geometry_of, passed
from torch import Tensor

from opsmith import ops
from opsmith.core.call_arguments import tensors_in
from opsmith.kernels.cuda.kernel import CudaKernel
from opsmith.kernels.cuda.launch import Geometry
from opsmith.kernels.cuda.plan import CudaChoice
from opsmith.ops.rms_norm import rms_norm_backward

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
ELSEWHERE = 0xABCD0000
"""Address in place of those of tensors that are made for a call, from which their numbers count."""


def rows(dtype: torch.dtype) -> Tensor:
    return torch.randn(4, 64).to(dtype)


def calls() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """A name, an operator and arguments."""
    yield "scaled", scaled, (torch.randn(3, 4), 2.0)
    yield "scaled, another number", scaled, (torch.randn(3, 4), -0.5, torch.randn(2))
    for dtype in DTYPES:
        x, weight, form = rows(dtype), torch.randn(64).to(dtype), str(dtype).removeprefix("torch.")
        rstd = ops.rms_norm.reference(x, weight)[1]
        yield f"rms_norm, {form}", ops.rms_norm, (x, weight, 1e-6)
        yield f"rms_norm, {form}, no weight", ops.rms_norm, (x, None, 1e-6)
        yield f"rms_norm, {form}, copied", ops.rms_norm, (rows(dtype).reshape(64, 4).mT, weight, 1e-6)
        yield f"rms_norm_backward, {form}", rms_norm_backward, (rows(dtype), x, weight, rstd)
        yield f"add_rms_norm_, {form}", ops.add_rms_norm_, (x.clone(), x.clone(), weight, 1e-6)
        strided = rows(dtype).reshape(64, 4).mT
        yield f"add_rms_norm_, {form}, strided", ops.add_rms_norm_, (strided, x.clone(), weight, 1e-6)
    new, positions = torch.randn(4, 2, 8), torch.arange(4)
    yield "rope_", ops.rope_, (new.clone(), ops.rope_table(4, 8), positions)
    cache = torch.zeros(4, 4, 2, 8)
    yield "write_kv_cache", ops.write_kv_cache, (cache, cache.clone(), new, new, positions)
    lists = [[torch.rand(3, at + 1) for at in range(40)] for _ in range(4)]
    yield "adamw_ of 40", ops.adamw_, (*lists, torch.zeros(()), 0.1)
    yield "adamw_ of 40, other numbers", ops.adamw_, (*lists, torch.zeros(()), 0.37, 0.5, 0.75, 1e-3)
    yield "adamw_ of 2", ops.adamw_, (*(each[:2] for each in lists), torch.zeros(()))


CALLS = {name: (operator, arguments) for name, operator, arguments in calls()}


@pytest.fixture
def launched() -> Iterator[list[tuple[bytes, Geometry, Any]]]:
    """Launches that the driver gets, with the addresses of the parameters replaced by their bytes."""
    seen: list[tuple[bytes, Geometry, Any]] = []

    @ON_LAUNCH
    def on_launch(function: int, name: bytes, numbers: Any, parameters: Any) -> int:
        (loaded,) = [each for each in kernels["it"].functions.loaded.items() if each[1].handle == function]
        described = kernels["it"].candidates([loaded[0][0]], ARCHITECTURE)[0]
        seen.append((name, geometry_of(numbers), passed(described, parameters)))
        return 0

    driver_library().fake_on_launch(on_launch)
    yield seen
    driver_library().fake_on_launch(ON_LAUNCH())


kernels: dict[str, CudaKernel] = {}


@pytest.mark.parametrize("name", CALLS)
def test_each_byte_is_what_python_lays_out(
    name: str, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, arguments = CALLS[name]
    kernel = loaded_anew(operator, monkeypatch)
    compare(operator, kernel, arguments, launched)
    assert kernel.cached_plans == 1
    kernel.reload()


SIZED = (
    "rms_norm, float32",
    "rms_norm, bfloat16, no weight",
    "rms_norm_backward, float32",
    "add_rms_norm_, float64",
)


@pytest.mark.parametrize("name", SIZED)
def test_calls_with_other_sizes_are_planned_by_the_recipe_as_by_python(
    name: str, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, arguments = CALLS[name]
    kernel = loaded_anew(operator, monkeypatch)
    compare(operator, kernel, arguments, launched)
    for rows in (2, 3, 5, 700):
        several = [
            each.repeat(rows, *[1] * (each.dim() - 1))[:rows].contiguous()
            if isinstance(each, Tensor) and each.dim() > 1
            else each
            for each in arguments
        ]
        compare(operator, kernel, several, launched)
    assert kernel.cached_plans == 1
    kernel.reload()


def loaded_anew(operator: Any, monkeypatch: pytest.MonkeyPatch) -> CudaKernel:
    kernel = next(each.given for each in operator.specification.kernels if isinstance(each.given, CudaKernel))
    monkeypatch.setattr(kernel, "machine", OnCpu())
    kernels["it"] = kernel
    kernel.reload()
    return kernel


def compare(operator: Any, kernel: CudaKernel, arguments: Any, launched: list[Any]) -> None:
    """Compare two calls with the plan in Python."""
    values = operator.specification.schema.call_values(arguments, {})
    choice = kernel.choose(values, ARCHITECTURE)
    assert isinstance(choice, CudaChoice), choice
    plan = kernel.plan(choice, values)
    given = {tensor.data_ptr() for tensor in tensors_in(values)}
    copied = dict(plan.copied)
    passed = [(each, index in copied) for index in plan.passed for each in tensors_in([values[index]])]
    addresses = [ELSEWHERE + at if copy else each.data_ptr() for at, (each, copy) in enumerate(passed)]
    made = len(plan.results) + len(plan.scratch)
    addresses += range(ELSEWHERE + len(addresses), ELSEWHERE + len(addresses) + made)
    for again in range(2):  # once planned in Python, once by the plan
        launched.clear()
        result = kernel(*arguments)
        results = [] if result is None else [result] if isinstance(result, Tensor) else list(result)
        assert len(launched) == len(plan.launches) > 0
        for (symbol, geometry, (found, offsets)), planned in zip(launched, plan.launches, strict=True):
            assert symbol.decode() == kernel.compile(planned.instance, ARCHITECTURE).name
            assert geometry == planned.geometry
            assert tuple(offsets) == planned.packed.offsets
            expected = planned.packed.with_addresses([addresses[at] for at in planned.tensors])
            for offset, at in zip(planned.packed.addresses, planned.tensors, strict=True):
                if addresses[at] not in given:  # a result, a scratch buffer or a copy, made for this call
                    (address,) = struct.unpack_from("<Q", found, offset)
                    assert address not in given, again
                    struct.pack_into("<Q", found, offset, ELSEWHERE + at)
            assert found == expected[: len(found)]
        layouts = [(each.shape, each.stride(), each.dtype) for each in results]
        assert layouts == [
            (each.layout.shape, each.layout.stride, each.layout.dtype) for each in plan.results
        ]
