"""Quick start: an operator, its gradients, its samples, and the check."""

import torch

import opsmith


@opsmith.operator("examples::linear")
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Affine map y = x Wᵀ + b.  x [B, M], weight [N, M], bias [N] -> [B, N]."""
    y = x @ weight.mT
    return y if bias is None else y + bias


linear.gradients(  # optional: what is not given is derived from the function above
    x=lambda grad, weight: grad @ weight,
    weight=lambda grad, x: grad.mT @ x,
    bias=lambda grad: grad.sum(0),
)
linear.samples(lambda make: [(make(4, 3), make(2, 3), make(2)), (make(5, 7), make(3, 7))])


def main() -> None:
    x, weight = torch.tensor([[4.0, 5.0]]), torch.tensor([[2.0, 3.0]], requires_grad=True)
    linear(x, weight).backward()
    print("gradient of weight:", weight.grad, linear.explain(x, weight), sep="\n")
    report = opsmith.check(linear)
    print(report.verdict())
    assert report.passed


if __name__ == "__main__":
    main()
