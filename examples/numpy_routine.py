"""A routine from outside of torch: opaque, with a fake kernel and a gradient of its own.

The gradient is written with the operator itself, so that there is every order of derivative.
"""

import scipy.special
import torch
from torch import Tensor

import opsmith


@opsmith.operator("examples::bessel", opaque=True)
def bessel(x: Tensor, order: int = 0) -> Tensor:
    """Bessel function of the first kind, element by element.  x [...], real -> [...]."""
    values = scipy.special.jv(order, x.detach().double().cpu().numpy())
    return torch.as_tensor(values, dtype=x.dtype, device=x.device)


@bessel.fake
def _(x, order=0):
    return torch.empty_like(x)


# J_n' = (J_{n-1} - J_{n+1}) / 2; Digital Library of Mathematical Functions, 10.6.1.
bessel.gradients(x=lambda grad, x, order: grad * (bessel(x, order - 1) - bessel(x, order + 1)) / 2)


@bessel.samples
def _(make):
    yield (make(3, 5),)
    yield make(7), 2


def main() -> None:
    x = torch.tensor([0.5, 1.0, 5.0], dtype=torch.float64, requires_grad=True)
    y = bessel(x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    print("J0(x)   =", y.tolist())
    print("J0'(x)  =", first.tolist())
    print("J0''(x) =", second.tolist())
    # Bessel's differential equation: x² J'' + x J' + x² J = 0.
    torch.testing.assert_close(x**2 * second + x * first + x**2 * y, torch.zeros_like(x))


if __name__ == "__main__":
    main()
