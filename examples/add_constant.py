"""An argument that is no tensor has no gradient, and nothing has to be said about it."""

import torch
from torch import Tensor

import opsmith


@opsmith.operator("examples::add_constant")
def add_constant(x: Tensor, constant: float) -> Tensor:
    """Add a number to each element.  x [...] -> [...]."""
    return x + constant


add_constant.gradients(x=lambda grad: grad)


@add_constant.samples
def _(make):
    yield make(3, 5), 2.0
    yield make.call(make(7), constant=-0.5)


def main() -> None:
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    y = add_constant(x, 0.5)
    y.backward(torch.tensor([1.0, 10.0, 100.0]))
    print("x + 0.5 =", y.tolist())
    print("gradient of x =", x.grad.tolist())
    assert y.tolist() == [1.5, 2.5, 3.5]
    assert x.grad.tolist() == [1.0, 10.0, 100.0]

    try:
        add_constant(x, "a half")
    except opsmith.errors.ArgumentError as error:
        print(f"\nWith a string for the constant:\n{error}")


if __name__ == "__main__":
    main()
