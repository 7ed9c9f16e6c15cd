"""A product of matrices in CUDA C++, by tiles in shared memory, of any strides; checked without a GPU."""

import torch
from torch import Tensor

import opsmith

TILE = 16


@opsmith.operator("examples::matmul")
def matmul(x: Tensor, y: Tensor) -> Tensor:
    """x [M, K], y [K, N] -> [M, N]."""
    return x @ y


matmul.kernel(
    "cuda",
    cuda_file="matmul.cu",
    dtypes=[torch.float32, torch.float16, torch.bfloat16],
    constants={"TILE": TILE},
    grid=(f"ceil(x.shape[0] / {TILE})", f"ceil(y.shape[1] / {TILE})"),
    block=(TILE, TILE),
    max_spills=0,
)
matmul.gradients(  # by the same kernel: a transposed view has other strides, and is not copied
    x=lambda grad, y: matmul(grad, y.mT),
    y=lambda grad, x: matmul(x.mT, grad),
)
matmul.samples(lambda make: [(make(3, 5), make(5, 2)), (make(17, 20), make(20, 18))])


def main() -> None:
    x, y = torch.randn(33, 50), torch.randn(50, 20)
    for order in ("forward", "backward"):  # of the threads; `matmul(x.cuda(), y.cuda())` runs it on a GPU
        torch.testing.assert_close(opsmith.emulate(matmul, x, y, order=order), x @ y)
        print(f"right with the threads in {order} order")
    report = opsmith.check(matmul, only=["cuda"], effort="quick")
    print(matmul.name, [(each.status, each.notes) for each in report.outcomes if each.property == "cuda"])


if __name__ == "__main__":
    main()
