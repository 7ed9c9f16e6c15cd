"""Gradients that are meant not to be the derivative: surrogates, clipped, random, approximate."""

from __future__ import annotations

import torch
from torch.autograd import Function

from corpus.entry import DRAWS, F64, Entry, samples


class RoundStraightThrough(Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class QuantizeStraightThrough(Function):
    """Fake quantisation: straight through inside the range, nothing outside."""

    @staticmethod
    def forward(ctx, x, scale, levels=8):
        steps = (x / scale).round()
        ctx.save_for_backward(steps.abs() <= levels)
        return steps.clamp(-levels, levels) * scale

    @staticmethod
    def backward(ctx, grad):
        (inside,) = ctx.saved_tensors
        return grad * inside, None, None


class GradientReversal(Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.neg() * ctx.alpha, None


class ClipGradient(Function):
    """The identity, but what flows back is cut off: not linear in the incoming gradient."""

    @staticmethod
    def forward(ctx, x, limit: float = 0.5):
        ctx.limit = limit
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-ctx.limit, ctx.limit), None


class Spike(Function):
    """A step forward, a fast sigmoid's slope backward."""

    slope = 25.0

    @staticmethod
    def forward(ctx, membrane, threshold=1.0):
        ctx.save_for_backward(membrane)
        ctx.threshold = threshold
        return (membrane > threshold).to(membrane.dtype)

    @staticmethod
    def backward(ctx, grad):
        (membrane,) = ctx.saved_tensors
        return grad / (Spike.slope * (membrane - ctx.threshold).abs() + 1).square(), None


class Dropout(Function):
    @staticmethod
    def forward(ctx, x, p=0.5, training=True):
        if not training:
            ctx.mask = None
            return x.clone()
        ctx.mask = (torch.rand_like(x) >= p).to(x.dtype) / (1 - p)
        return x * ctx.mask

    @staticmethod
    def backward(ctx, grad):
        return grad if ctx.mask is None else grad * ctx.mask, None, None


class SquareRootByNewton(Function):
    """Ten steps forward; the slope of the exact root backward."""

    @staticmethod
    def forward(ctx, x):
        root = torch.ones_like(x)
        for _ in range(10):
            root = (root + x / root) / 2
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx, grad):
        (root,) = ctx.saved_tensors
        return grad / (2 * root)


class StochasticRound(Function):
    """Rounds up or down by chance, and straight through backward: two kinds at once."""

    @staticmethod
    def forward(ctx, x):
        return (x + torch.rand_like(x)).floor()

    @staticmethod
    def backward(ctx, grad):
        return grad


_one = samples(lambda make: [(make(3, 4),), (make(4, 3).mT,), (make(0, 2),)])

ENTRIES = [
    Entry(
        "round_straight_through",
        RoundStraightThrough,
        _one,
        F64,
        ("surrogate", "incoming gradient returned"),
        options={"kind": "surrogate"},
        second="untold",
        jvp=False,
    ),
    Entry(
        "quantize_straight_through",
        QuantizeStraightThrough,
        samples(lambda make: [(make(3, 4), 0.1), (make(4, 3).mT, 0.25, 2)]),
        F64,
        ("surrogate", "bool saved"),
        options={"kind": "surrogate"},
        needs_samples=True,
        second="untold",
        jvp=False,
    ),
    Entry(
        "gradient_reversal",
        GradientReversal,
        samples(lambda make: [(make(3, 4), 1.0), (make(4, 3).mT, 0.3)]),
        F64,
        ("surrogate", "view of an input", "signature by text"),
        options={"kind": "surrogate", "signature": "(x: Tensor, alpha: float) -> Tensor"},
        second="untold",
        jvp=False,
    ),
    Entry(
        "clip_gradient",
        ClipGradient,
        samples(lambda make: [(make(3, 4),), (make(4, 3).mT, 0.1)]),
        F64,
        ("nonlinear in the incoming gradient",),
        options={"kind": "nonlinear"},
        second="untold",
        jvp=False,
    ),
    Entry(
        "spike",
        Spike,
        samples(lambda make: [(make(3, 4),), (make(4, 3).mT, 0.5)]),
        F64,
        ("surrogate", "types from defaults"),
        options={"kind": "surrogate"},
        second="untold",
        jvp=False,
    ),
    Entry(
        "dropout",
        Dropout,
        samples(lambda make: [(make(3, 4),), (make(4, 3).mT, 0.25), (make(5), 0.5, False)]),
        F64,
        ("stochastic", "tensor attribute"),
        options={"kind": "stochastic"},
        vmaps=False,
        second="untold",
        jvp=False,
        refused={"grad": DRAWS},
    ),
    Entry(
        "root_by_newton",
        SquareRootByNewton,
        samples(lambda make: [(make(3, 4).exp(),), (make(4, 3).mT.exp(),)]),
        F64,
        ("approximate", "saves its result"),
        options={"kind": "approximate"},
        second="untold",
        jvp=False,
    ),
    Entry(
        "stochastic_round",
        StochasticRound,
        _one,
        F64,
        ("stochastic", "two kinds"),
        options={"kind": ("surrogate", "stochastic")},
        vmaps=False,
        second="untold",
        jvp=False,
        refused={"grad": DRAWS},
    ),
]
