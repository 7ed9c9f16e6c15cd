"""A histogram and a sum in CUDA: several blocks contribute to one result."""

import torch
from torch import Tensor

import opsmith


@opsmith.operator("examples::histogram", results={"counts": opsmith.non_differentiable})
def histogram(x: Tensor, bins: int) -> Tensor:
    """x [...] int64 -> counts [bins]: how often each number below `bins` is there."""
    return (x.flatten()[:, None] == torch.arange(bins, device=x.device)).sum(0)


@opsmith.operator("examples::total")
def total(x: Tensor) -> Tensor:
    """x [...] -> the sum of all numbers."""
    return x.sum()


histogram.kernel(  # whole numbers: atomics give the same sum in every order
    "cuda",
    cuda_file="histogram.cu",
    grid="min(ceil(x.numel / 1024), 1024)",
    shared="4 * bins",
    initial={"counts": 0},
)
total.kernel(  # without atomics, so that each run rounds as any other
    "cuda",
    cuda_file="histogram.cu",
    scratch={"sums": ("min(max(ceil(x.numel / 1024), 1), 1024)", "x")},
    launches=[
        opsmith.Launch("partial_sums(x, sums)", grid="sums.numel"),
        opsmith.Launch("fold(sums, result)", grid=1),
    ],
)
total.gradients(x=lambda grad, x: grad.expand_as(x))
histogram.samples(lambda make: [(torch.tensor([[0, 3, 3], [1, 6, 3]]), 7), (torch.arange(1500) % 5, 4)])
total.samples(lambda make: [(make(40, 60),), (make(3),)])


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, weight = torch.arange(5000, device=device) % 7, torch.randn(3000, device=device)
    with opsmith.testing.emulated_cuda() as calls:  # without a GPU the same kernels run on the CPU
        torch.testing.assert_close(histogram(x, 9), histogram.reference(x, 9))
        torch.testing.assert_close(total(weight), total.reference(weight))
    print(calls)


if __name__ == "__main__":
    main()
