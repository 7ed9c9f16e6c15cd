"""Softmax in CUDA C++ by shuffles within a warp, with a kernel for its gradient; checked without a GPU."""

import torch
from torch import Tensor

import opsmith

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BY_ROWS = {"cuda_file": "softmax.cu", "dtypes": DTYPES, "block": (32, 8), "max_spills": 0}


@opsmith.operator("examples::softmax_in_cuda")
def softmax(x: Tensor) -> Tensor:
    """Softmax of each row.  x [M, N] -> [M, N]."""
    return x.softmax(1)


@opsmith.operator("examples::softmax_backward")
def softmax_backward(dy: Tensor, y: Tensor) -> Tensor:
    """Gradient of `softmax` by x.  dy, y [M, N] -> [M, N]."""
    return y * (dy - (dy * y).sum(1, keepdim=True))


softmax.kernel("cuda", entry="softmax", grid="ceil(x.shape[0] / 8)", **BY_ROWS)
softmax_backward.kernel("cuda", grid="ceil(y.shape[0] / 8)", **BY_ROWS)
softmax.gradients(x=lambda grad, result: softmax_backward(grad, result))
softmax.samples(lambda make: [(make(3, 5),), (make(9, 40),)])
softmax_backward.samples(lambda make: [(make(3, 5), make(3, 5).softmax(1))])


def main() -> None:
    x, weight = torch.randn(4, 100, requires_grad=True), torch.randn(4, 100)
    with opsmith.testing.emulated_cuda() as emulated:  # on the CPU; tensors on a GPU need no context
        (softmax(x) * weight).sum().backward()
    (right,) = torch.autograd.grad((x.softmax(1) * weight).sum(), x)
    torch.testing.assert_close(x.grad, right)
    print(emulated)
    for operator in (softmax, softmax_backward):
        report = opsmith.check(operator, only=["cuda"], effort="quick")
        print(
            operator.name, [(each.status, each.notes) for each in report.outcomes if each.property == "cuda"]
        )


if __name__ == "__main__":
    main()
