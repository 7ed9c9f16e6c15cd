"""The operators. A reference in plain PyTorch defines the right result; the rest is checked against it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import opsmith
import torch
from torch import Tensor


@opsmith.operator(
    "my_kernels::swish",
    shapes="x: ... C, beta: C -> ... C",  # checked in each call; compilers and the check use it
    batching="...",  # vmap adds a leading dimension and makes one call
)
def swish(x: Tensor, beta: Tensor) -> Tensor:
    """Compute x sigmoid(beta x), with one beta for each channel.

    Args:
        x: [..., C], floating.
        beta: [C].

    Returns:
        [..., C].

    Example:
        >>> swish(torch.tensor([[-1.0, 2.0]]), torch.tensor([0.0, 1.0]))
        tensor([[-0.5000,  1.7616]])
    """
    return x * torch.sigmoid(beta * x)


# Gradients. Without formulas autograd differentiates the reference. A formula names the values that it needs:
# inputs, `result`, or `grad`, the gradient of the result. Only these are saved.


def _gradient_of_x(grad: Tensor, x: Tensor, beta: Tensor) -> Tensor:
    s = torch.sigmoid(beta * x)
    return grad * (s + beta * x * s * (1 - s))


def _gradient_of_beta(grad: Tensor, x: Tensor, beta: Tensor) -> Tensor:
    s = torch.sigmoid(beta * x)
    return grad * x * x * s * (1 - s)  # [..., C]: opsmith sums over dimensions that beta lacks


swish.gradients(x=_gradient_of_x, beta=_gradient_of_beta)


# Kernels, in separate files. If a kernel does not take a call, the reference computes it. `swish.explain(x,
# beta)` names the implementation of a call, and the reason.

swish.kernel("cpu", cpp_file="swish.cpp", dtypes=[torch.float32, torch.float64])
# <cuda>
swish.kernel(
    "cuda",
    cuda_file="swish.cu",
    dtypes=[torch.float32, torch.float16, torch.bfloat16],
    grid="min(ceil(x.numel / 256), 65535)",
    block=256,
    max_spills=0,
)
# </cuda>


# Samples: small and odd sizes. The check, benchmarks, exports and pages begin with these samples, and derive
# more from them.


@swish.samples
def _(make: opsmith.Make) -> Iterator[Any]:
    yield make(4, 5), make(5)
    yield make(2, 3, 7), make(7)
    yield make(3), make(3)
    yield make(0, 2), make(2)


# A torch.nn.Module that owns beta: `Swish(64)` is a layer of a network.

Swish = swish.module(
    sizes=("channels",),
    parameters={"beta": ("channels",)},
    init={"beta": opsmith.init.constant(1.0)},
)
