"""Right `autograd.Function`s that move elements about; `planted_places` breaks them one by one."""

from typing import Any

import torch
import torch.nn.functional as F
from entries import sound
from heldout_numbers import normal, whole
from torch.autograd import Function


class Embedding(Function):
    @staticmethod
    def forward(ctx, table, index):
        ctx.save_for_backward(index)
        ctx.rows = table.shape[0]
        return table[index]

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        by_table = grad.new_zeros(ctx.rows, grad.shape[-1])
        return by_table.index_add(0, index.reshape(-1), grad.reshape(index.numel(), grad.shape[-1])), None


class ScatterSum(Function):
    """Rows that share an index are added, as in a graph network."""

    @staticmethod
    def forward(ctx, x, index, size):
        ctx.save_for_backward(index)
        return x.new_zeros(size, x.shape[1]).index_add(0, index, x)

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        return grad[index], None, None


class CumulativeSum(Function):
    @staticmethod
    def forward(ctx, x):
        return x.cumsum(-1)

    @staticmethod
    def backward(ctx, grad):
        return grad.flip(-1).cumsum(-1).flip(-1)


class Roll(Function):
    @staticmethod
    def forward(ctx, x, places):
        ctx.places = places
        return x.roll(places, -1)

    @staticmethod
    def backward(ctx, grad):
        return grad.roll(-ctx.places, -1), None


class CausalConv(Function):
    """One filter of three taps for each channel: y[t] = sum of w[k] x[t - k]."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        length = x.shape[-1]
        padded = F.pad(x, (2, 0))
        return sum(weight[:, k, None] * padded[..., 2 - k : 2 - k + length] for k in range(3))

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        length = x.shape[-1]
        late = F.pad(grad, (0, 2))
        padded = F.pad(x, (2, 0))
        by_x = sum(weight[:, k, None] * late[..., k : k + length] for k in range(3))
        by_weight = [(grad * padded[..., 2 - k : 2 - k + length]).sum((0, 2)) for k in range(3)]
        return by_x, torch.stack(by_weight, -1)


class UnfoldConv(Function):
    """A convolution by matrices of patches, without a bias."""

    @staticmethod
    def forward(ctx, x, weight, stride, padding):
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        kernel = weight.shape[2:]
        patches = F.unfold(x, kernel, stride=stride, padding=padding)
        size = [(n + 2 * padding - k) // stride + 1 for n, k in zip(x.shape[2:], kernel, strict=True)]
        return (weight.flatten(1) @ patches).unflatten(-1, size)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        kernel, flat = weight.shape[2:], grad.flatten(2)
        patches = F.unfold(x, kernel, stride=ctx.stride, padding=ctx.padding)
        by_patches = weight.flatten(1).mT @ flat
        by_x = F.fold(by_patches, x.shape[2:], kernel, stride=ctx.stride, padding=ctx.padding)
        by_weight = (flat @ patches.mT).sum(0).view(weight.shape)
        return by_x, by_weight, None, None


class MaxPool(Function):
    """Over windows of two, side by side; what is left over does not count."""

    @staticmethod
    def forward(ctx, x):
        if x.shape[-1] < 2:
            raise ValueError(f"MaxPool: rows must have two elements, got {x.shape[-1]}")
        ctx.length = x.shape[-1]
        whole = ctx.length // 2
        value, place = x[..., : 2 * whole].unflatten(-1, (whole, 2)).max(-1)
        place = place + 2 * torch.arange(whole)
        ctx.save_for_backward(place)
        return value

    @staticmethod
    def backward(ctx, grad):
        (place,) = ctx.saved_tensors
        return grad.new_zeros(*grad.shape[:-1], ctx.length).scatter(-1, place, grad)


class AveragePool(Function):
    """Over windows of two, side by side; what is left over does not count."""

    @staticmethod
    def forward(ctx, x):
        if x.shape[-1] < 2:
            raise ValueError(f"AveragePool: rows must have two elements, got {x.shape[-1]}")
        ctx.shape = x.shape
        whole = x.shape[-1] // 2
        return x[..., : 2 * whole].unflatten(-1, (whole, 2)).mean(-1)

    @staticmethod
    def backward(ctx, grad):
        by_x = grad.new_zeros(ctx.shape)
        by_x[..., : 2 * grad.shape[-1]] = grad.repeat_interleave(2, -1) / 2
        return by_x


class TopK(Function):
    """The largest of each row, and where they are."""

    @staticmethod
    def forward(ctx, x, k):
        value, place = x.topk(k, -1)
        ctx.shape = x.shape
        ctx.save_for_backward(place)
        ctx.mark_non_differentiable(place)
        return value, place

    @staticmethod
    def backward(ctx, grad, _):
        (place,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).scatter(-1, place, grad), None


class Sort(Function):
    @staticmethod
    def forward(ctx, x):
        value, order = x.sort(-1)
        ctx.save_for_backward(order)
        return value

    @staticmethod
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        return torch.zeros_like(grad).scatter(-1, order, grad)


def angles(x: torch.Tensor, base: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of each position's angles, one for each pair of columns."""
    length, width = x.shape[-2:]
    frequency = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(length)[:, None] * frequency
    return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


class Rotary(Function):
    """Pairs (i, i + n/2) are turned by the angle of their position."""

    @staticmethod
    def forward(ctx, x, base):
        if x.shape[-1] % 2:
            raise ValueError(f"Rotary: the width must be even, got {x.shape[-1]}")
        ctx.base = base
        cos, sin = angles(x, base)
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = angles(grad, ctx.base)
        first, second = grad.chunk(2, -1)
        return torch.cat([first * cos + second * sin, second * cos - first * sin], -1), None


class LowerTriangle(Function):
    @staticmethod
    def forward(ctx, x):
        return x.tril()

    @staticmethod
    def backward(ctx, grad):
        return grad.tril()


class UpsampleNearest(Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.repeat_interleave(factor, -1)

    @staticmethod
    def backward(ctx, grad):
        return grad.unflatten(-1, (-1, ctx.factor)).sum(-1), None


@sound
def embedding() -> Any:
    return Embedding, [(normal(6, 3), whole(2, 4, high=6))]


@sound
def scatter_sum() -> Any:
    return ScatterSum, [(normal(5, 3), whole(5, high=4), 4)]


@sound
def cumulative_sum() -> Any:
    return CumulativeSum, [(normal(3, 5),)]


@sound
def roll() -> Any:
    return Roll, [(normal(3, 5), 1)]


@sound
def causal_convolution() -> Any:
    return CausalConv, [(normal(2, 3, 6), normal(3, 3, seed=1))]


@sound
def unfold_convolution() -> Any:
    return UnfoldConv, [(normal(2, 2, 5, 5), normal(3, 2, 3, 3, seed=1), 2, 1)]


@sound
def max_pool() -> Any:
    return MaxPool, [(normal(3, 6),), (normal(2, 5, seed=1),)]


@sound
def average_pool() -> Any:
    return AveragePool, [(normal(3, 6),), (normal(2, 5, seed=1),)]


@sound
def top_k_and_where() -> Any:
    return TopK, [(normal(3, 5), 2)]


@sound
def sort() -> Any:
    return Sort, [(normal(3, 5),)]


@sound
def rotary() -> Any:
    return Rotary, [(normal(2, 3, 4), 100.0)]


@sound
def lower_triangle() -> Any:
    return LowerTriangle, [(normal(4, 4),)]


@sound
def upsample_nearest() -> Any:
    return UpsampleNearest, [(normal(2, 3), 2)]
