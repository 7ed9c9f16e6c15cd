"""Messages about rare faults of CUDA kernels on the CPU, by one kernel that has them all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.kernels.cuda.emulation import compiler

KERNEL = """
__global__ void faulty(View<const float, 1> x, int fault, Contiguous<float, 1> y) {
  const int i = threadIdx.x;
  __shared__ const float* kept;
  float own = x(i % 4), more = 0;
  void (*volatile nowhere)() = nullptr;
  if (i == 0) kept = &own;
  __syncthreads();
  if (fault == 1) more = x.data[1];
  if (fault == 2 && i < 16) more = __shfl_sync(0xffffu, own, 20);
  if (fault == 3 && i < 16) __syncwarp();
  if (fault == 4) more = float(1 << int(own + 40));
  if (fault == 5) more = *kept;
  if (fault == 6) nowhere();
  __syncthreads();
  if (i < 4) y[i] = own + more;
}
"""
FIRST = "thread (0, 0, 0) of block (0, 0, 0)"
SECOND = "thread (1, 0, 0) of block (0, 0, 0)"


def faulty(x: Tensor, fault: int) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


OPERATOR = opsmith.operator("emulation_rare::faulty")(faulty).kernel("cuda", cuda=KERNEL, grid=1, block=32)


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("fault", "cause", "message"),
    [
        (
            1,
            "out-of-bounds",
            f"{FIRST} reads 4 bytes between the elements of `x` [4], whose strides are [2]",
        ),
        (2, "divergent-barrier", f"{FIRST} takes the value of lane 20, which has no part in the shuffle"),
        (
            3,
            "divergent-barrier",
            "thread (15, 0, 0) of block (0, 0, 0) waits for lanes of its mask that do not come",
        ),
        (
            4,
            "undefined",
            f"{FIRST}: it shifts by a negative number of bits, or by at least the number's width",
        ),
        (5, "out-of-bounds", f"{SECOND} reads 4 bytes of a local variable of another thread"),
        (6, "out-of-bounds", f"{FIRST} uses memory that does not exist, and the process ends"),
    ],
    ids=["between", "lane", "mask", "shift", "stack", "nowhere"],
)
def test_a_rare_fault_has_its_message(fault: int, cause: str, message: str) -> None:
    with pytest.raises(errors.KernelFaultError) as caught:
        opsmith.emulate(OPERATOR, torch.arange(8.0)[::2], fault)
    assert caught.value.problem == f"the CUDA kernel is faulty: {cause}"
    assert (caught.value.got or "").splitlines()[0].startswith(message)
    assert f": if (fault == {fault}" in (caught.value.got or "").splitlines()[1]


def test_without_a_fault_there_is_no_message() -> None:
    assert opsmith.emulate(OPERATOR, torch.arange(8.0)[::2], 0).tolist() == [0, 2, 4, 6]


def test_a_compiler_that_does_not_compile_the_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        compiler, "_RUNTIME_FLAGS", (*compiler._RUNTIME_FLAGS, "-include", "no-such-header.h")
    )
    with pytest.raises(errors.ToolchainError) as caught:
        opsmith.emulate(OPERATOR, torch.arange(8.0)[::2], 0)
    assert caught.value.problem == "the C++ compiler does not compile the emulation of CUDA C++"
    assert "no-such-header.h" in (caught.value.got or "")
    assert caught.value.hint == "name a different compiler in CXX"
