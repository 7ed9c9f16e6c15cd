"""An operator returns new tensors: where torch would give a view of the input, copy it."""

import torch
from torch import Tensor

import opsmith


@opsmith.operator("examples::transpose")
def transpose(x: Tensor, dim0: int, dim1: int) -> Tensor:
    """Exchange two dimensions.  x [..., M, ..., N, ...] -> [..., N, ..., M, ...]."""
    return x.transpose(dim0, dim1).clone()  # without `.clone()`: AliasError


transpose.gradients(x=lambda grad, dim0, dim1: grad.transpose(dim0, dim1))


@transpose.samples
def _(make):
    yield make(3, 5), 0, 1
    yield make(2, 3, 4), -1, 0


def main() -> None:
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    y = transpose(x, 0, 1)
    y.backward(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    print("x =", x.tolist())
    print("y =", y.tolist())
    print("gradient of x =", x.grad.tolist())
    assert y.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert x.grad.tolist() == [[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]

    y.detach().zero_()
    print("x, after y was set to zero, =", x.tolist())
    assert x.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


if __name__ == "__main__":
    main()
