"""Functions that keep attributes, results, intermediates or None for their backward, some of them by need."""

from __future__ import annotations

import torch
from torch.autograd import Function

from corpus.entry import F64, Entry, samples


class MeanSquare(Function):
    """Keeps its tensors as attributes, as much public code does."""

    @staticmethod
    def forward(ctx, x, target):
        ctx.difference = x - target
        ctx.count = x.numel()
        return ctx.difference.square().mean()

    @staticmethod
    def backward(ctx, grad):
        by_x = grad * 2 * ctx.difference / ctx.count
        return by_x, -by_x


class ClampWithMask(Function):
    """Keeps one attribute that is a bool tensor and one that is not a tensor."""

    @staticmethod
    def forward(ctx, x, low: float = -0.5, high: float = 0.5):
        ctx.inside = (x >= low) & (x <= high)
        ctx.bounds = low, high
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx, grad):
        assert ctx.bounds[0] < ctx.bounds[1]
        return grad * ctx.inside, None, None


class MatmulByNeed(Function):
    """Saves a factor only where the other one's gradient is wanted."""

    @staticmethod
    def forward(ctx, a, b):
        by_a, by_b = ctx.needs_input_grad
        ctx.save_for_backward(b if by_a else None, a if by_b else None)
        return a @ b

    @staticmethod
    def backward(ctx, grad):
        b, a = ctx.saved_tensors
        return (
            grad @ b.mT if ctx.needs_input_grad[0] else None,
            a.mT @ grad if ctx.needs_input_grad[1] else None,
        )


class Swish(Function):
    """Saves its input alone and computes the sigmoid again."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0]
        sigmoid = torch.sigmoid(x)
        return grad * (sigmoid * (1 + x * (1 - sigmoid)))


class LogSumExp(Function):
    @staticmethod
    def forward(ctx, x, dim, keepdim=False):
        largest = x.amax(dim, keepdim=True)
        result = (x - largest).exp().sum(dim, keepdim=True).log() + largest
        ctx.dim, ctx.keepdim = dim, keepdim
        result = result if keepdim else result.squeeze(dim)
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx, grad):
        x, result = ctx.saved_tensors
        if not ctx.keepdim:
            grad, result = grad.unsqueeze(ctx.dim), result.unsqueeze(ctx.dim)
        return grad * (x - result).exp(), None, None


class LayerNorm(Function):
    """Saves two intermediates: a second derivative through its own code forgets that they depend on x."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps=1e-5):
        mean = x.mean(-1, keepdim=True)
        rstd = (x.var(-1, correction=0, keepdim=True) + eps).rsqrt()
        normal = (x - mean) * rstd
        ctx.save_for_backward(normal, rstd, weight)
        return normal * weight + bias

    @staticmethod
    def backward(ctx, grad):
        normal, rstd, weight = ctx.saved_tensors
        rows = tuple(range(grad.ndim - 1))
        scaled = grad * weight
        inner = scaled.mean(-1, keepdim=True) + normal * (scaled * normal).mean(-1, keepdim=True)
        return (scaled - inner) * rstd, (grad * normal).sum(rows), grad.sum(rows), None


class Softmax(Function):
    """Saves its result in setup_context, where it is still tied to the input."""

    @staticmethod
    def forward(x, temperature: float = 1.0):
        return torch.softmax(x / temperature, -1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.temperature = inputs[1]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return y * (grad - (grad * y).sum(-1, keepdim=True)) / ctx.temperature, None


class SigmoidWithSlope(Function):
    """Saves an intermediate that holds the derivative itself."""

    @staticmethod
    def forward(ctx, x):
        result = x.sigmoid()
        ctx.save_for_backward(result * (1 - result))
        return result

    @staticmethod
    def backward(ctx, grad):
        (slope,) = ctx.saved_tensors
        return grad * slope


ENTRIES = [
    Entry(
        "mean_square",
        MeanSquare,
        samples(lambda make: [(make(3, 4), make(3, 4)), (make(4, 3).mT, make(3, 4))]),
        F64,
        ("tensor attribute",),
        truth=lambda x, target: (x - target).square().mean(),
        second="truth",
    ),
    Entry(
        "clamp_with_mask",
        ClampWithMask,
        samples(lambda make: [(make(3, 4),), (make(4, 3).mT, -1.0, 0.25), (make(0, 2),)]),
        F64,
        ("tensor attribute", "bool saved", "attribute"),
        truth=lambda x, low=-0.5, high=0.5: x.clamp(low, high),
    ),
    Entry(
        "matmul_by_need",
        MatmulByNeed,
        samples(lambda make: [(make(3, 4), make(4, 2)), (make(2, 4, 3).mT, make(2, 4, 5))]),
        F64,
        ("saving by need", "saved None"),
        truth=torch.matmul,
    ),
    Entry(
        "swish",
        Swish,
        samples(lambda make: [(make(3, 4),), (make(4, 6)[:, ::2],), (make(0),)]),
        F64,
        ("computed again",),
        truth=torch.nn.functional.silu,
    ),
    Entry(
        "logsumexp",
        LogSumExp,
        samples(lambda make: [(make(3, 4), 1), (make(4, 3).mT, 0, True), (make(2, 3, 2), -1)]),
        F64,
        ("saves its result", "dim and keepdim", "types from samples"),
        needs_samples=True,
        truth=torch.logsumexp,
    ),
    Entry(
        "layer_norm",
        LayerNorm,
        samples(
            lambda make: [
                (make(3, 4), make(4), make(4)),
                (make(5, 2, 3).transpose(0, 1), make(3), make(6)[::2], 1e-3),
            ]
        ),
        F64,
        ("saved intermediate", "types from defaults"),
        truth=lambda x, weight, bias, eps=1e-5: torch.nn.functional.layer_norm(
            x, x.shape[-1:], weight, bias, eps
        ),
        second="truth",
    ),
    Entry(
        "softmax",
        Softmax,
        samples(lambda make: [(make(3, 4), 1.0), (make(4, 3).mT, 0.5)]),
        F64,
        ("setup_context", "saves its result"),
        truth=lambda x, temperature: torch.softmax(x / temperature, -1),
    ),
    Entry(
        "sigmoid_with_slope",
        SigmoidWithSlope,
        samples(lambda make: [(make(3, 4),), (make(4, 3).mT,)]),
        F64,
        ("saved intermediate",),
        truth=torch.sigmoid,
        second="truth",
    ),
]
