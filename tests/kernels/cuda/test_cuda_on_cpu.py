"""The emulated GPU has barriers and shared memory, and finds kernels that misuse them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cuda_on_cpu import emulate, forget, instances, on_cpu
from torch import Tensor

import opsmith
from opsmith import errors

TURNED = """
template <class T>
__global__ void NAME(Contiguous<const T, 1> x, Contiguous<T, 1> y) {
  T* held = opsmith::shared_memory<T>();
  __shared__ T first;
  const int at = threadIdx.x, from = blockIdx.x * blockDim.x;
  held[at WRITTEN] = x[from + at];
  if (at == 0) first = x[from];
  WAIT
  y[from + at] = held[blockDim.x - 1 - at] + first;
}
"""


def turned(name: str, wait: str, written: str = "") -> opsmith.Operator[[Tensor], Tensor]:
    """x, each 8 of it turned about, and the first of these added."""

    def reference(x: Tensor) -> Tensor:
        rows = x.view(-1, 8)
        return (rows.flip(1) + rows[:, :1]).flatten()

    reference.__name__ = name
    operator = opsmith.operator(f"cuda_on_cpu::{name}")(reference)
    text = TURNED.replace("NAME", name).replace("WAIT", wait).replace("WRITTEN", written)
    operator.kernel("cuda", cuda=text, grid="x.numel // 8", block=8, shared="8 * x.itemsize")
    return operator


RIGHT = turned("right", "__syncthreads();")
WRONG = {
    "hasty": turned("hasty", ""),
    "parted": turned("parted", "if (at < 4) __syncthreads();"),
    "elsewhere": turned("elsewhere", "if (at < 4) { __syncthreads(); }\n else { __syncthreads(); }"),
    "beyond": turned("beyond", "__syncthreads();", "+ 1"),
}


@opsmith.operator("cuda_on_cpu::ones")
def ones(x: Tensor) -> Tensor:
    return torch.ones_like(x)


ones.kernel(
    "cuda",
    cuda="""
__global__ void ones(Contiguous<const float> x, Contiguous<float> y) {
  OPSMITH_EACH(i, y.numel()) y[i] = 0;
  OPSMITH_EACH(i, y.numel()) y[i] += 1;
}
""",
    grid=(2, 3, 2),
    block=(4, 2, 2),
)


@pytest.fixture(scope="module", autouse=True)
def _emulated() -> Iterator[None]:
    kernels = [on_cpu(each) for each in (RIGHT, ones, *WRONG.values())]
    emulate({kernel: instances(kernel) for kernel in kernels})
    forget(dry=False)
    yield
    forget()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_threads_wait_for_one_another(dtype: torch.dtype) -> None:
    x = torch.arange(24, dtype=dtype)
    assert torch.equal(RIGHT(x), RIGHT.reference(x))


def test_without_a_barrier_nothing_is_there_yet() -> None:
    """Shared memory that no thread has written is nan."""
    x = torch.arange(8.0)
    assert WRONG["hasty"](x).isnan().any()


@pytest.mark.parametrize("name", ["parted", "elsewhere"])
def test_a_barrier_is_for_all_threads(name: str) -> None:
    with pytest.raises(errors.KernelError, match="CUDA_ERROR_LAUNCH_FAILED"):
        WRONG[name](torch.arange(8.0))


def test_shared_memory_ends_where_the_launch_says() -> None:
    with pytest.raises(errors.KernelError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        WRONG["beyond"](torch.arange(8.0))


@pytest.mark.parametrize("numbers", [1, 10, 191, 192, 193, 1000])
def test_each_number_belongs_to_one_thread_of_all_dimensions(numbers: int) -> None:
    assert ones(torch.zeros(numbers)).tolist() == [1.0] * numbers
