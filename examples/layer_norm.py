"""Hidden results: what the forward has computed anyway, callers need not see, and formulas use."""

import torch
from torch import Tensor

import opsmith


@opsmith.operator("examples::layer_norm", hidden=("mean", "rstd"))
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise the last dimension (arXiv:1607.06450).  x [..., N], weight [N], bias [N] -> [..., N]."""
    mean = x.mean(-1, keepdim=True)
    rstd = ((x - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    return (x - mean) * rstd * weight + bias, mean, rstd


def gradient_of_x(grad, x, weight, mean, rstd):
    normal, inner = (x - mean) * rstd, grad * weight
    along = normal * (inner * normal).mean(-1, keepdim=True)
    return rstd * (inner - inner.mean(-1, keepdim=True) - along)


layer_norm.gradients(
    x=gradient_of_x,
    weight=lambda grad, x, mean, rstd: grad * (x - mean) * rstd,  # opsmith sums over the leading dimensions
    bias=lambda grad: grad,
)


@layer_norm.samples
def _(make):
    yield make(4, 5), make(5), make(5)
    yield make(2, 3, 7), make(7), make(7), 1e-3


def main() -> None:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in [(2, 5), 5, 5])
    y, expected = layer_norm(x, weight, bias), torch.nn.functional.layer_norm(x, (5,), weight, bias)
    print(y)
    torch.testing.assert_close(y, expected)
    gradients = torch.autograd.grad(y.square().sum(), [x, weight, bias])
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.square().sum(), [x, weight, bias]))
    print("saved for the backward:", ", ".join(layer_norm.explain(x, weight, bias).saved))
    # The formulas use the hidden results, which depend on x: the second order follows them there.
    assert torch.autograd.gradgradcheck(layer_norm, (x, weight, bias))


if __name__ == "__main__":
    main()
