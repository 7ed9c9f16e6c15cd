"""The driver that stands in for CUDA's refuses what the real one refuses, by what it reads from the cubin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_driver import ARCHITECTURE, driver, emulate, forget, instances, launch, on_cpu, record
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.kernels.cuda.compiler import Cubin
from opsmith.kernels.cuda.launch import Geometry
from opsmith.kernels.runtime.driver import DriverError

INVALID, RESOURCES = "CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"


def compiled(name: str, text: str) -> tuple[Any, Cubin]:
    """A kernel, and the cubin of its first instance."""

    @opsmith.operator(f"fake_driver::{name}")
    def ones(x: Tensor) -> Tensor:
        return torch.ones_like(x)

    ones.kernel("cuda", cuda=text, entry="ones", grid=(2, 3, 2), block=(4, 2, 2))
    kernel = on_cpu(ones)
    return ones, kernel.compile(instances(kernel)[0], ARCHITECTURE)


def status(cubin: Cubin, *, block: int = 32, shared: int = 0, allowed: int | None = None) -> str:
    """Error that the driver returns for a launch; empty if there is none."""
    forget()
    with driver().on_device(0):
        function = driver().load(cubin.image, cubin.name)
        try:
            if allowed is not None:
                driver().allow_shared(function, allowed)
            geometry = Geometry((1, 1, 1), (block, 1, 1), shared)
            launch(function, geometry)
        except DriverError as error:
            assert record().launches == 0
            return str(error).partition(" returns ")[2].partition(":")[0]
    assert record().launches == 1
    return ""


ONES = "__global__ void BOUNDS ones(Contiguous<const float> x, Contiguous<float> y) { BODY }"
STATIC = ONES.replace("BODY", "__shared__ volatile float held[10240]; held[threadIdx.x] = 1; y[0] = held[0];")


def test_static_and_dynamic_shared_memory_count_together() -> None:
    _, cubin = compiled("static", STATIC.replace("BOUNDS", ""))
    assert cubin.resources.shared == 40 * 1024
    assert status(cubin, shared=8 * 1024) == ""
    assert status(cubin, shared=8 * 1024 + 1) == INVALID
    assert status(cubin, shared=187 * 1024, allowed=187 * 1024) == ""
    assert status(cubin, shared=8 * 1024 + 1, allowed=8 * 1024) == INVALID
    assert status(cubin, allowed=187 * 1024 + 1) == INVALID


def test_a_block_keeps_to_launch_bounds() -> None:
    _, cubin = compiled(
        "bounded", ONES.replace("BOUNDS", "__launch_bounds__(64)").replace("BODY", "y[0] = 1;")
    )
    assert (status(cubin, block=64), status(cubin, block=65)) == ("", INVALID)
    _, plain = compiled("unbounded", ONES.replace("BOUNDS", "").replace("BODY", "y[0] = 1;"))
    assert (status(plain, block=1024), status(plain, block=1025)) == ("", INVALID)


def test_a_block_has_so_many_registers() -> None:
    body = """
    float held[128];
#pragma unroll
    for (int k = 0; k < 128; k++) held[k] = x[threadIdx.x + k];
    for (int round = 0; round < y.numel(); round++) {
#pragma unroll
      for (int k = 0; k < 128; k++) held[k] = held[k] * held[(k + 1) % 128] + round;
    }
#pragma unroll
    for (int k = 0; k < 128; k++) y[threadIdx.x * 128 + k] = held[k];
"""
    _, cubin = compiled("registers", ONES.replace("BOUNDS", "").replace("BODY", body))
    most = 64 * 1024 // (-(-cubin.resources.registers // 8) * 8) // 128 * 128
    assert most < 512
    assert (status(cubin, block=most), status(cubin, block=most + 1)) == ("", RESOURCES)


@pytest.mark.parametrize("numbers", [1, 10, 191, 192, 193, 1000])
def test_the_emulation_gets_what_the_driver_got(numbers: int) -> None:
    """Each number belongs to one thread of all dimensions."""
    body = "OPSMITH_EACH(i, y.numel()) y[i] = 0; OPSMITH_EACH(i, y.numel()) y[i] += 1;"
    operator, _ = compiled("each", ONES.replace("BOUNDS", "").replace("BODY", body))
    kernel = on_cpu(operator)
    emulate({kernel: instances(kernel)})
    forget(dry=False)
    assert operator(torch.zeros(numbers)).tolist() == [1.0] * numbers
    assert ([*record().grid], [*record().block]) == ([2, 3, 2], [4, 2, 2])
    forget()


def test_a_fault_is_an_error_of_the_launch() -> None:
    operator, _ = compiled("beyond", ONES.replace("BOUNDS", "").replace("BODY", "y[y.numel()] = 1;"))
    kernel = on_cpu(operator)
    emulate({kernel: instances(kernel)})
    forget(dry=False)
    with pytest.raises(errors.KernelFaultError, match="out-of-bounds"):
        operator(torch.zeros(5))
    assert record().depth == 0
    forget()
