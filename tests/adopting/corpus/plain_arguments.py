"""Plain arguments of every kind, and gradients that are more or fewer than the inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from corpus.entry import F64, Entry, samples


class Elementwise(Function):
    """Any function, with its derivative beside it."""

    @staticmethod
    def forward(ctx, x, function, derivative):
        ctx.save_for_backward(x)
        ctx.derivative = derivative
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * ctx.derivative(x), None, None


class ThroughFrozen(Function):
    """Applies a module whose parameters are not trained."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return layer(x)

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.layer.weight.detach(), None


class Crop(Function):
    @staticmethod
    def forward(ctx, x, start, size):
        ctx.start, ctx.shape = start, x.shape
        (i, j), (h, w) = start, size
        return x[..., i : i + h, j : j + w].clone()

    @staticmethod
    def backward(ctx, grad):
        (i, j), (h, w) = ctx.start, grad.shape[-2:]
        full = grad.new_zeros(ctx.shape)
        full[..., i : i + h, j : j + w] = grad
        return full, None, None


class Concatenate(Function):
    @staticmethod
    def forward(ctx, dim: int, *tensors: Tensor):
        ctx.dim = dim
        ctx.sizes = [tensor.shape[dim] for tensor in tensors]
        return torch.cat(tensors, dim)

    @staticmethod
    def backward(ctx, grad):
        return None, *grad.split(ctx.sizes, ctx.dim)


class MaskedScale(Function):
    """The optional arguments stand between the others."""

    @staticmethod
    def forward(ctx, x, mask, scale, shift):
        ctx.save_for_backward(mask)
        ctx.scale = 1.0 if scale is None else scale
        y = x * ctx.scale
        if mask is not None:
            y = y.masked_fill(mask, 0.0)
        return y + shift

    @staticmethod
    def backward(ctx, grad):
        (mask,) = ctx.saved_tensors
        by_x = grad * ctx.scale
        if mask is not None:
            by_x = by_x.masked_fill(mask, 0.0)
        return by_x, None, None, grad


class Checkpoint(Function):
    """Saves only the inputs and runs the function again in the backward."""

    @staticmethod
    def forward(ctx, function, *inputs):
        ctx.function = function
        ctx.save_for_backward(*inputs)
        with torch.no_grad():
            return function(*inputs)

    @staticmethod
    def backward(ctx, grad):
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            result = ctx.function(*inputs)
        return None, *torch.autograd.grad(result, inputs, grad)


class LeakyWithDefault(Function):
    """Returns one gradient: it is only ever called with one argument."""

    @staticmethod
    def forward(ctx, x, slope=0.1):
        ctx.save_for_backward(x)
        ctx.slope = slope
        return torch.where(x > 0, x, slope * x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, grad, ctx.slope * grad)


class SoftplusGenerous(Function):
    """Returns more gradients than it has inputs; torch takes that when the rest is None."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.log1p(x.exp())

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.sigmoid(), None, None


class Reduced(Function):
    """A mode given by name and an optional dtype."""

    @staticmethod
    def forward(ctx, x: Tensor, mode: str = "mean", dtype: torch.dtype | None = None) -> Tensor:
        ctx.shape, ctx.count, ctx.dtype = x.shape, x.numel() if mode == "mean" else 1, x.dtype
        return x.sum(dtype=dtype) / ctx.count

    @staticmethod
    def backward(ctx, grad: Tensor):
        return (grad / ctx.count).to(ctx.dtype).expand(ctx.shape), None, None


def gaussian(x: Tensor) -> Tensor:
    return (-x.square()).exp()


def gaussian_slope(x: Tensor) -> Tensor:
    return -2 * x * gaussian(x)


def product_of_tanh(x: Tensor, y: Tensor) -> Tensor:
    return x.tanh() * y


def _layer(make: Any) -> torch.nn.Linear:
    layer = torch.nn.Linear(3, 2, dtype=torch.float64).requires_grad_(False)
    layer.weight.copy_(make(2, 3))
    layer.bias.copy_(make(2))
    return layer


def _crop_signature(x: Tensor, start: tuple[int, int], size: tuple[int, int]) -> Tensor: ...


ENTRIES = [
    Entry(
        "elementwise",
        Elementwise,
        samples(lambda make: [(make(3, 4), gaussian, gaussian_slope), (make(4, 3).mT, torch.sin, torch.cos)]),
        F64,
        ("callable argument", "types from samples"),
        needs_samples=True,
        truth=lambda x, function, derivative: function(x),
        exports=False,
    ),
    Entry(
        "through_frozen",
        ThroughFrozen,
        samples(lambda make: [(make(4, 3), _layer(make)), (make(3, 2).t(), _layer(make))]),
        F64,
        ("module argument",),
        needs_samples=True,
        exports=False,
    ),
    Entry(
        "crop",
        Crop,
        samples(lambda make: [(make(5, 4), (1, 0), (3, 2)), (make(2, 4, 5).transpose(1, 2), (0, 1), (2, 2))]),
        F64,
        ("tuple argument", "signature by function"),
        options={"signature": _crop_signature},
    ),
    Entry(
        "concatenate",
        Concatenate,
        samples(
            lambda make: [(0, make(2, 3), make(1, 3), make(3, 3).T), (1, make(2, 3)), (-1, make(2), make(0))]
        ),
        F64,
        ("any number of arguments", "types from annotations"),
        truth=lambda dim, *tensors: torch.cat(tensors, dim),
    ),
    Entry(
        "masked_scale",
        MaskedScale,
        samples(
            lambda make: [
                (make(3, 4), make(3, 4) > 0, 2.0, make(3, 4)),
                (make(4, 3).mT, None, None, make(3, 4)),
                (make(2), make(2) > 0, None, make(2)),
            ]
        ),
        F64,
        ("None argument", "saved None", "signature by text"),
        options={
            "signature": "(x: Tensor, mask: Tensor | None, scale: float | None, shift: Tensor) -> Tensor"
        },
    ),
    Entry(
        "checkpoint",
        Checkpoint,
        samples(
            lambda make: [(product_of_tanh, make(3, 4), make(3, 4)), (gaussian, make(2, 3).mT)],
        ),
        F64,
        ("runs again in its backward", "callable argument", "any number of arguments"),
        needs_samples=True,
        truth=lambda function, *inputs: function(*inputs),
        second="never-wrong",
        compiles=False,
        exports=False,
        jvp=False,
        vmaps=False,
    ),
    Entry(
        "leaky_with_default",
        LeakyWithDefault,
        samples(lambda make: [(make(3, 4),), (make(4, 6)[:, ::2],)]),
        F64,
        ("fewer gradients than inputs", "types from defaults"),
    ),
    Entry(
        "softplus_generous",
        SoftplusGenerous,
        samples(lambda make: [(make(3, 4),), (make(4, 3).mT,)]),
        F64,
        ("more gradients than inputs",),
    ),
    Entry(
        "reduced",
        Reduced,
        samples(lambda make: [(make(3, 4),), (make(4, 3).mT, "sum"), (make(5), "mean", torch.float64)]),
        F64,
        ("string argument", "dtype argument", "types from annotations", "expanded gradient"),
    ),
]
