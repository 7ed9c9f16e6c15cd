"""A kernel in Triton: launched on a GPU, seen by torch.compile, and held to the reference without a GPU."""

from __future__ import annotations  # the annotations of a kernel are then no code, and need no Triton

import torch
from torch import Tensor

import opsmith

try:
    import triton
    import triton.language as tl
except ImportError:  # the reference runs there, and `explain` says why
    triton = tl = None


def softmax_kernel(x_ptr, result_ptr, x_size_1, x_stride_0, x_stride_1, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    there = column < x_size_1
    x = tl.load(x_ptr + row * x_stride_0 + column * x_stride_1, mask=there, other=-float("inf")).to(
        tl.float32
    )
    e = tl.exp(x - tl.max(x, 0))
    tl.store(result_ptr + row * x_size_1 + column, e / tl.sum(e, 0), mask=there)


@opsmith.operator("examples::softmax")
def softmax(x: Tensor) -> Tensor:
    """Softmax of each row.  x [M, N] -> [M, N]."""
    return x.softmax(1)


softmax.gradients(x=lambda grad, result: result * (grad - (grad * result).sum(1, keepdim=True)))
softmax.kernel(
    "cuda",
    triton=softmax_kernel,
    grid=lambda x: x.shape[0],
    constants={"BLOCK": lambda x: triton.next_power_of_2(x.shape[1])},
)


@softmax.samples
def _(make):
    yield make(3, 5)


def main() -> None:
    x = torch.randn(4, 100, device="cuda" if torch.cuda.is_available() else "cpu")
    torch.testing.assert_close(softmax(x), x.softmax(1))
    print(softmax.explain(x))
    print(opsmith.check(softmax, only=["forward", "gradient", "triton"], effort="quick"))


if __name__ == "__main__":
    main()
