"""A random operator: it says so, and keeps what it drew in a hidden result that has no gradient."""

import torch
from torch import Tensor

import opsmith


@opsmith.operator(
    "examples::dropout",
    random=True,
    results={"result": ..., "mask": opsmith.non_differentiable},
    hidden=("mask",),
)
def dropout(x: Tensor, probability: float = 0.5) -> tuple[Tensor, Tensor]:
    """Set elements to zero at random, and scale the others up.  x [...] -> [...]."""
    mask = torch.rand_like(x) >= probability
    return x * mask / (1 - probability), mask


dropout.gradients(x=lambda grad, mask, probability: grad * mask / (1 - probability))


@dropout.samples
def _(make):
    yield (make(4, 5),)
    yield make.call(make(7), probability=0.2)


def main() -> None:
    torch.manual_seed(0)
    x = torch.full((10_000,), 3.0, requires_grad=True)
    y = dropout(x, 0.25)
    y.sum().backward()
    kept = y != 0
    print(f"kept: {kept.float().mean():.1%}; mean of the result: {y.mean():.3f}")
    print("saved for the backward:", ", ".join(dropout.explain(x).saved))
    assert abs(kept.float().mean() - 0.75) < 0.02
    assert torch.equal(x.grad, kept / 0.75)

    torch.manual_seed(0)
    assert torch.equal(dropout(x, 0.25), y)


if __name__ == "__main__":
    main()
