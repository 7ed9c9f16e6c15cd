"""Results of every form: written in place, the input itself, nested, None, integers, another dtype."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function

from corpus.entry import F64, Entry, samples


class ReLUInPlace(Function):
    @staticmethod
    def forward(ctx, x):
        x.relu_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        (result,) = ctx.saved_tensors
        return grad * (result > 0)


class Barrier(Function):
    """Hands its input on and scales what flows back by one."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad.clone()


class Standardize(Function):
    """The statistics come nested, and torch does not follow what is nested."""

    @staticmethod
    def forward(ctx, x):
        mean, scale = x.mean(), x.std(correction=0)
        ctx.save_for_backward(x)
        return (x - mean) / scale, (mean, scale)

    @staticmethod
    def backward(ctx, grad, _statistics):
        (x,) = ctx.saved_tensors
        scale = x.std(correction=0)
        y = (x - x.mean()) / scale
        return (grad - grad.mean() - y * (grad * y).mean()) / scale


class WithOptionalWeights(Function):
    """Attention over rows: the weights are returned where they are asked for, else None."""

    @staticmethod
    def forward(
        ctx, scores: Tensor, values: Tensor, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(scores, values)
        weights = scores.softmax(-1)
        return weights @ values, weights if need_weights else None

    @staticmethod
    def backward(ctx, grad, grad_weights):
        scores, values = ctx.saved_tensors
        weights = scores.softmax(-1)
        inner = grad @ values.mT
        if grad_weights is not None:
            inner = inner + grad_weights
        by_scores = weights * (inner - (inner * weights).sum(-1, keepdim=True))
        return by_scores, weights.mT @ grad, None


class TopK(Function):
    @staticmethod
    def forward(ctx, x: Tensor, k: int, dim: int = -1) -> tuple[Tensor, Tensor]:
        values, indices = x.topk(k, dim)
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices)
        ctx.dim, ctx.shape = dim, x.shape
        return values, indices

    @staticmethod
    def backward(ctx, grad, _grad_indices):
        (indices,) = ctx.saved_tensors
        zeros = torch.zeros(ctx.shape, dtype=grad.dtype, device=grad.device)
        return zeros.scatter(ctx.dim, indices, grad), None, None


class Bucket(Function):
    """Only an integer result: nothing flows back, and nothing is marked."""

    @staticmethod
    def forward(ctx, x, width=0.5):
        return (x / width).floor().long()

    @staticmethod
    def backward(ctx, grad):
        return None, None


class MaxAndPlace(Function):
    """Its second result is an integer and is not marked; torch tells that from its dtype."""

    @staticmethod
    def forward(ctx, x):
        value, place = x.max(-1)
        ctx.save_for_backward(place)
        ctx.width = x.shape[-1]
        return value, place

    @staticmethod
    def backward(ctx, grad, _):
        (place,) = ctx.saved_tensors
        zeros = torch.zeros(*grad.shape, ctx.width, dtype=grad.dtype, device=grad.device)
        return zeros.scatter(-1, place.unsqueeze(-1), grad.unsqueeze(-1))


class HalfPrecisionSum(Function):
    """Computes in float32 whatever it is given; torch casts the gradient back."""

    @staticmethod
    def forward(ctx, x, y):
        x, y = x.float(), y.float()
        ctx.save_for_backward(x, y)
        return x * y + x

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * (y + 1), grad * x


class SinCos(Function):
    """Gradients that never came are None, not zeros."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.sin(), x.cos(), x * 2

    @staticmethod
    def backward(ctx, grad_sin, grad_cos, grad_double):
        (x,) = ctx.saved_tensors
        total = None
        for grad, slope in (
            (grad_sin, x.cos()),
            (grad_cos, -x.sin()),
            (grad_double, torch.full_like(x, 2.0)),
        ):
            if grad is not None:
                total = grad * slope if total is None else total + grad * slope
        return total


class RunningSum(Function):
    """With setup_context: one result that is floating and marked as not differentiable."""

    @staticmethod
    def forward(x):
        return x.cumsum(-1), x.detach().amax(-1), (x > 0).sum(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, largest, positive = output
        ctx.mark_non_differentiable(largest, positive)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad, grad_largest, grad_positive):
        assert grad_largest is None
        assert grad_positive is None
        return None if grad is None else grad.flip(-1).cumsum(-1).flip(-1)


ENTRIES = [
    Entry(
        "relu_in_place",
        ReLUInPlace,
        samples(lambda make: [(make(3, 4),), (make(4, 3).mT,), (make(0),)]),
        F64,
        ("mark_dirty",),
        in_place=True,
        truth=torch.relu,
    ),
    Entry(
        "barrier",
        Barrier,
        samples(lambda make: [(make(3, 4),), (make(4, 6)[:, ::2],)]),
        F64,
        ("input returned",),
        truth=torch.clone,
    ),
    Entry(
        "standardize",
        Standardize,
        samples(lambda make: [(make(3, 4),), (make(5, 2).mT,)]),
        (F64, (F64, F64)),
        ("nested result",),
    ),
    Entry(
        "optional_weights",
        WithOptionalWeights,
        samples(
            lambda make: [
                (make(3, 4), make(4, 2)),
                (make(2, 3, 4), make(2, 4, 2), True),
                (make(4, 3).mT, make(4, 2)),
            ]
        ),
        (F64, None),
        ("None result", "bool argument"),
    ),
    Entry(
        "top_k",
        TopK,
        samples(lambda make: [(make(3, 5), 2), (make(5, 3).mT, 3, 0), (make(4), 1)]),
        (F64, "int64"),
        ("mark_non_differentiable", "integer result"),
        truth=lambda x, k, dim=-1: tuple(x.topk(k, dim)),
    ),
    Entry(
        "bucket",
        Bucket,
        samples(lambda make: [(make(3, 4),), (make(4, 3).mT, 0.25)]),
        "int64",
        ("integer result only",),
        options={"kind": "surrogate"},
        second="untold",
        jvp=False,
    ),
    Entry(
        "max_and_place",
        MaxAndPlace,
        samples(lambda make: [(make(3, 4),), (make(4, 3).mT,), (make(2, 3, 4)[:, ::2],)]),
        (F64, "int64"),
        ("integer result",),
    ),
    Entry(
        "computed_in_float32",
        HalfPrecisionSum,
        samples(lambda make: [(make(3, 4), make(3, 4)), (make(4, 3).mT, make(3, 4))]),
        "float32",
        ("float32 result of float64",),
        options={"kind": "float32"},
        second="untold",
        jvp=False,
    ),
    Entry(
        "sin_cos",
        SinCos,
        samples(lambda make: [(make(3, 4),), (make(4, 3).mT,)]),
        (F64, F64, F64),
        ("set_materialize_grads", "several results"),
        truth=lambda x: (x.sin(), x.cos(), x * 2),
    ),
    Entry(
        "running_sum",
        RunningSum,
        samples(lambda make: [(make(3, 4),), (make(4, 3).mT,)]),
        (F64, F64, "int64"),
        ("set_materialize_grads", "mark_non_differentiable", "setup_context"),
    ),
]
