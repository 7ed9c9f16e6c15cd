"""Indexing, reductions, products, windows, and gradients of a broadcast shape."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from corpus.entry import F64, Entry, samples


class GatherRows(Function):
    @staticmethod
    def forward(ctx, table, index):
        ctx.save_for_backward(index)
        ctx.rows = table.shape[0]
        return table[index]

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        flat = grad.reshape(index.numel(), *grad.shape[index.ndim :])
        zeros = torch.zeros(ctx.rows, *flat.shape[1:], dtype=grad.dtype, device=grad.device)
        return zeros.index_add(0, index.reshape(-1), flat), None


class ScatterAdd(Function):
    """The number of rows of the result is a plain argument."""

    @staticmethod
    def forward(ctx, source, index, rows: int):
        ctx.save_for_backward(index)
        return source.new_zeros(rows, source.shape[1]).index_add(0, index, source)

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        return grad.index_select(0, index), None, None


class MeanOver(Function):
    @staticmethod
    def forward(ctx, x: Tensor, dim: int = -1, keepdim: bool = False) -> Tensor:
        ctx.dim, ctx.keepdim, ctx.shape = dim, keepdim, x.shape
        return x.mean(dim, keepdim=keepdim)

    @staticmethod
    def backward(ctx, grad):
        if not ctx.keepdim:
            grad = grad.unsqueeze(ctx.dim)
        return grad.expand(ctx.shape) / ctx.shape[ctx.dim], None, None


class MatmulTransposed(Function):
    @staticmethod
    def forward(ctx, a, b, transpose_a=False, transpose_b=False):
        ctx.save_for_backward(a, b)
        ctx.transposed = transpose_a, transpose_b
        return (a.t() if transpose_a else a) @ (b.t() if transpose_b else b)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        transpose_a, transpose_b = ctx.transposed
        left, right = a.t() if transpose_a else a, b.t() if transpose_b else b
        by_left, by_right = grad @ right.t(), left.t() @ grad
        return by_left.t() if transpose_a else by_left, by_right.t() if transpose_b else by_right, None, None


class ConvolveUnfolded(Function):
    @staticmethod
    def forward(ctx, x, weight, padding: tuple[int, int] = (0, 0)):
        columns = F.unfold(x, weight.shape[2:], padding=padding)
        ctx.save_for_backward(x, weight)
        ctx.padding = padding
        height = x.shape[2] + 2 * padding[0] - weight.shape[2] + 1
        return (weight.flatten(1) @ columns).unflatten(2, (height, -1))

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        flat = grad.flatten(2)
        by_x = by_weight = None
        if ctx.needs_input_grad[0]:
            columns = weight.flatten(1).t() @ flat
            by_x = F.fold(columns, x.shape[2:], weight.shape[2:], padding=ctx.padding)
        if ctx.needs_input_grad[1]:
            columns = F.unfold(x, weight.shape[2:], padding=ctx.padding)
            by_weight = (flat @ columns.mT).sum(0).view(weight.shape)
        return by_x, by_weight, None


class BroadcastMul(Function):
    """Returns gradients of the broadcast shape; torch sums them to the inputs' shapes."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y, grad * x


class SumAll(Function):
    """Its gradient has stride zero everywhere."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        return grad.expand(ctx.shape)


def _rows(make: Any) -> list[Any]:
    return [
        (make(5, 3), make.integers(5, 4)),
        (make(3, 5).t(), make.integers(5, 2, 3)),
        (make(4), make.integers(4, 0)),
    ]


ENTRIES = [
    Entry("gather_rows", GatherRows, samples(_rows), F64, ("integer tensor",), truth=lambda t, i: t[i]),
    Entry(
        "scatter_add",
        ScatterAdd,
        samples(
            lambda make: [(make(4, 3), make.integers(6, 4), 6), (make(3, 5).t(), make.integers(2, 5), 2)]
        ),
        F64,
        ("integer tensor", "types from annotations"),
    ),
    Entry(
        "mean_over",
        MeanOver,
        samples(lambda make: [(make(3, 4),), (make(4, 3).mT, 0), (make(2, 3, 4), 1, True)]),
        F64,
        ("dim and keepdim", "expanded gradient"),
        truth=lambda x, dim=-1, keepdim=False: x.mean(dim, keepdim=keepdim),
    ),
    Entry(
        "matmul_transposed",
        MatmulTransposed,
        samples(
            lambda make: [
                (make(3, 4), make(4, 2)),
                (make(4, 3), make(4, 2), True),
                (make(4, 3), make(2, 4), True, True),
                (make(4, 3).t(), make(2, 4), False, True),
            ]
        ),
        F64,
        ("bool argument", "types from defaults"),
    ),
    Entry(
        "convolve_unfolded",
        ConvolveUnfolded,
        samples(
            lambda make: [
                (make(2, 2, 4, 5), make(3, 2, 2, 3)),
                (make(1, 1, 3, 4).mT, make(1, 1, 3, 3), (1, 1)),
            ]
        ),
        F64,
        ("tuple argument", "needs_input_grad"),
        truth=lambda x, weight, padding=(0, 0): F.conv2d(x, weight, padding=padding),
    ),
    Entry(
        "broadcast_mul",
        BroadcastMul,
        samples(lambda make: [(make(3, 4), make(4)), (make(3, 1), make(1, 4)), (make(2, 3, 4), make())]),
        F64,
        ("broadcast gradient",),
        truth=torch.mul,
    ),
    Entry(
        "sum_all",
        SumAll,
        samples(lambda make: [(make(3, 4),), (make(4, 3).mT,), (make(0),)]),
        F64,
        ("expanded gradient",),
        truth=torch.sum,
    ),
]
