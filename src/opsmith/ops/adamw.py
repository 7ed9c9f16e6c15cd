"""Step of the optimizer AdamW over lists of tensors, in place.

Source: I. Loshchilov, F. Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, arXiv:1711.05101.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import opsmith


@opsmith.operator("opsmith::adamw_", mutates=["parameters", "means", "squares", "step"])
def adamw_(
    parameters: list[Tensor],
    derivatives: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    step: Tensor,
    learning_rate: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> None:
    """Update parameters by one step of AdamW; call it under `torch.no_grad()`.

    With t = step + 1, for each parameter p, its gradient g, mean m and square v:
    m <- β₁ m + (1 - β₁) g, v <- β₂ v + (1 - β₂) g², and
    p <- (1 - η λ) p - η / (1 - β₁ᵗ) m / (√v / √(1 - β₂ᵗ) + ε).

    Args:
        parameters: Floating tensors of any shapes; written. The CUDA kernel takes up to 50.
        derivatives: Gradient of each parameter, of its shape.
        means: Running means of the gradients, of their shapes, zeros at first; written.
        squares: Running means of their squares, zeros at first; written.
        step: Number of earlier steps, floating, without dimensions; written: it is increased by one. The
            kernel takes float32, or float64 if the parameters are float64.
        learning_rate: η.
        beta1: β₁, the decay rate of the means.
        beta2: β₂, the decay rate of the means of squares.
        eps: ε, added to the root.
        weight_decay: λ.

    Raises:
        KernelError, ValueError: If a list is not as long as `parameters`, a tensor has a wrong shape, or a
            tensor that must be floating is not. MutationError: If a tensor that is written cannot be written.

    Example:
        >>> import torch
        >>> weights, means, squares = [torch.ones(2)], [torch.zeros(2)], [torch.zeros(2)]
        >>> step = torch.tensor(0.0)
        >>> adamw_(weights, [torch.tensor([0.5, -3.0])], means, squares, step, 0.25, weight_decay=0.0)
        >>> weights, step
        ([tensor([0.7500, 1.2500])], tensor(1.))
    """
    for at, parameter in enumerate(parameters):
        if not parameter.is_floating_point():
            raise ValueError(f"parameters[{at}] must be floating, not {parameter.dtype}")
    for name, given in (("derivatives", derivatives), ("means", means), ("squares", squares)):
        if len(given) != len(parameters):
            raise ValueError(f"{name} has {len(given)} tensors for {len(parameters)} parameters")
        for at, (tensor, parameter) in enumerate(zip(given, parameters, strict=True)):
            if tensor.shape != parameter.shape:
                expected = f"parameters[{at}] has {list(parameter.shape)}"
                raise ValueError(f"{name}[{at}] has the shape {list(tensor.shape)}, but {expected}")
    if step.ndim or not step.is_floating_point():
        raise ValueError(f"step is {step.dtype} of shape {list(step.shape)}: a floating number is needed")
    step.add_(1)
    step_size = learning_rate / (1 - beta1**step)
    correction = (1 - beta2**step).sqrt()
    for parameter, derivative, mean, square in zip(parameters, derivatives, means, squares, strict=True):
        parameter.mul_(1 - learning_rate * weight_decay)
        mean.mul_(beta1).add_(derivative, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(derivative, derivative, value=1 - beta2)
        parameter.sub_(step_size * mean / (square.sqrt() / correction + eps))


def _blocks(parameters: list[Tensor]) -> tuple[int, int]:
    """Return the grid of the CUDA kernel: blocks for the largest tensor, by the number of tensors.

    A thread reads 16 bytes at a time. With enough blocks for any GPU, a thread reads several times.
    """
    most = max((each.nbytes for each in parameters), default=0)
    return min(-(-most // 4096), max(32, 8192 // max(1, len(parameters)))), len(parameters)


_DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
adamw_.kernel("cpu", cpp_file="adamw.cpp", dtypes=_DTYPES)
adamw_.kernel(
    "cuda",
    cuda_file="adamw.cu",
    dtypes=_DTYPES,
    scratch={"same": (6, "step")},
    launches=[
        opsmith.Launch("count(step, learning_rate, beta1, beta2, eps, weight_decay, same)", grid=1, block=1),
        opsmith.Launch("adamw_(parameters, derivatives, means, squares, same)", grid=_blocks),
    ],
    max_spills=0,
)


@adamw_.samples
def _(make: opsmith.Make) -> Iterator[Any]:
    for shapes in (((3,), (2, 2)), ((),)):
        tensors = [[make(*shape) for shape in shapes] for _ in range(3)]
        squares = [make(*shape, low=0.1, high=2.0) for shape in shapes]
        yield *tensors, squares, torch.tensor(2.0), 0.1
