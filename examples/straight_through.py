"""A gradient that is wrong on purpose: signs have derivative zero, and training needs another one.

The estimator is that of I. Hubara et al., "Binarized Neural Networks", 2016, equation 4.
"""

import torch
from torch import Tensor

import opsmith


@opsmith.operator("examples::binarize")
def binarize(x: Tensor) -> Tensor:
    """+1 where x is at least 0, else -1.  x [...] -> [...]."""
    return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)


# The first argument says which function's true gradient this is: `opsmith.check` holds the formula to it.
binarize.surrogate_gradients(
    lambda x: x.clamp(-1, 1),
    x=lambda grad, x: grad * (x.abs() <= 1),
)


@binarize.samples
def _(make):
    yield (make(4, 5),)
    yield (make(7),)


def main() -> None:
    torch.manual_seed(0)
    target = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0, 1.0, 1.0, -1.0])
    weight = torch.empty(8).uniform_(-0.1, 0.1).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.02)
    print("signs at first: ", binarize(weight).int().tolist())
    for _ in range(200):
        x = torch.randn(32, 8)
        loss = ((x @ binarize(weight) - x @ target) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("signs learned:  ", binarize(weight).int().tolist())
    print("signs to learn: ", target.int().tolist())
    assert torch.equal(binarize(weight), target)


if __name__ == "__main__":
    main()
