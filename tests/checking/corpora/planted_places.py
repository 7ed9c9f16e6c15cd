"""Planted: `autograd.Function`s that move elements about, and gradients to the wrong place."""

from typing import Any

import sound_places as right
import torch
import torch.nn.functional as F
from entries import planted
from heldout_numbers import normal, whole
from torch.autograd import Function


@planted("embedding", "missing-term", input="table", also=("region",))
def embedding_that_keeps_the_last() -> Any:
    """Assignment by index keeps one of the gradients of a row that is looked up several times."""

    class Embedding(right.Embedding):
        @staticmethod
        def backward(ctx, grad):
            (index,) = ctx.saved_tensors
            by_table = grad.new_zeros(ctx.rows, grad.shape[-1])
            by_table[index] = grad
            return by_table, None

    return Embedding, [(normal(6, 3), torch.tensor([[0, 2, 5, 2], [1, 0, 4, 4]]))]


@planted("embedding", "dtype", input="table", also=("raises",))
def embedding_into_the_default_dtype() -> Any:
    class Embedding(right.Embedding):
        @staticmethod
        def backward(ctx, grad):
            (index,) = ctx.saved_tensors
            by_table = torch.zeros(ctx.rows, grad.shape[-1])
            return by_table.index_add_(0, index.reshape(-1), grad.reshape(-1, grad.shape[-1])), None

    return Embedding, [(normal(6, 3), whole(2, 4, high=6))]


@planted("embedding", "layout", input="table", also=("raises",))
def embedding_that_views_its_gradient() -> Any:
    class Embedding(right.Embedding):
        @staticmethod
        def backward(ctx, grad):
            (index,) = ctx.saved_tensors
            by_table = grad.new_zeros(ctx.rows, grad.shape[-1])
            return by_table.index_add(0, index.view(-1), grad.view(-1, grad.shape[-1])), None

    return Embedding, [(normal(6, 3), whole(2, 4, high=6))]


@planted("scatter", "scale", input="x", also=("region",))
def scatter_sum_divided_as_a_mean() -> Any:
    """The gradient of the mean over each group, for a forward that adds: each row has its own factor."""

    class ScatterSum(right.ScatterSum):
        @staticmethod
        def backward(ctx, grad):
            (index,) = ctx.saved_tensors
            count = index.bincount(minlength=grad.shape[0]).clamp(min=1)
            return (grad / count[:, None])[index], None, None

    return ScatterSum, [(normal(5, 3), torch.tensor([0, 2, 2, 3, 2]), 4)]


@planted("cumsum", "unknown", input="x")
def cumulative_sum_the_same_way() -> Any:
    """It adds up from the front again, where the gradient adds up from the back."""

    class CumulativeSum(right.CumulativeSum):
        @staticmethod
        def backward(ctx, grad):
            return grad.cumsum(-1)

    return CumulativeSum, [(normal(3, 5),)]


@planted("cumsum", "region", input="x")
def cumulative_sum_without_the_last() -> Any:
    """A loop that ends one too early: the last element gets nothing of its own."""

    class CumulativeSum(right.CumulativeSum):
        @staticmethod
        def backward(ctx, grad):
            by_x = torch.zeros_like(grad)
            total = grad.sum(-1)
            for at in range(grad.shape[-1] - 1):
                by_x[..., at] = total
                total = total - grad[..., at]
            return by_x

    return CumulativeSum, [(normal(3, 5),)]


@planted("roll", "shifted", input="x")
def roll_the_same_way() -> Any:
    class Roll(right.Roll):
        @staticmethod
        def backward(ctx, grad):
            return grad.roll(ctx.places, -1), None

    return Roll, [(normal(3, 5), 1)]


@planted("causal_conv", "shifted", input="x")
def causal_convolution_one_step_late() -> Any:
    """The gradient is padded on both sides, and read one step too far on."""

    class CausalConv(right.CausalConv):
        @staticmethod
        def backward(ctx, grad):
            _, by_weight = right.CausalConv.backward(ctx, grad)
            _, weight = ctx.saved_tensors
            length = grad.shape[-1]
            late = F.pad(grad, (0, 3))
            by_x = sum(weight[:, k, None] * late[..., k + 1 : k + 1 + length] for k in range(3))
            return by_x, by_weight

    return CausalConv, [(normal(2, 3, 6), normal(3, 3, seed=1))]


@planted("causal_conv", "unknown", input="weight", also=("region",))
def causal_convolution_with_flipped_taps() -> Any:
    class CausalConv(right.CausalConv):
        @staticmethod
        def backward(ctx, grad):
            by_x, by_weight = right.CausalConv.backward(ctx, grad)
            return by_x, by_weight.flip(-1)

    return CausalConv, [(normal(2, 3, 6), normal(3, 3, seed=1))]


@planted("conv", "transposed", input="weight")
def convolution_with_turned_kernel() -> Any:
    class UnfoldConv(right.UnfoldConv):
        @staticmethod
        def backward(ctx, grad):
            by_x, by_weight, _, _ = right.UnfoldConv.backward(ctx, grad)
            return by_x, by_weight.transpose(2, 3), None, None

    return UnfoldConv, [(normal(2, 2, 5, 5), normal(3, 2, 3, 3, seed=1), 2, 1)]


@planted("conv", "unreduced-broadcast", input="weight", also=("missing-term",))
def convolution_of_the_first_image() -> Any:
    """The weight serves every image of the batch; the gradient of the first is taken for the sum."""

    class UnfoldConv(right.UnfoldConv):
        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            by_x, *_ = right.UnfoldConv.backward(ctx, grad)
            patches = F.unfold(x, weight.shape[2:], stride=ctx.stride, padding=ctx.padding)
            return by_x, (grad.flatten(2) @ patches.mT)[0].view(weight.shape), None, None

    return UnfoldConv, [(normal(2, 2, 5, 5), normal(3, 2, 3, 3, seed=1), 2, 1)]


@planted("max_pool", "shifted", input="x")
def max_pool_counted_from_one() -> Any:
    """As in code that came from a language that counts from one; the last place goes around."""

    class MaxPool(right.MaxPool):
        @staticmethod
        def backward(ctx, grad):
            (place,) = ctx.saved_tensors
            by_x = grad.new_zeros(*grad.shape[:-1], ctx.length)
            return by_x.scatter(-1, (place + 1) % ctx.length, grad)

    return MaxPool, [(normal(3, 6),), (normal(2, 5, seed=1),)]


@planted("average_pool", "nondeterministic", input="x", also=("region", "nan"))
def average_pool_that_leaves_memory_as_it_was() -> Any:
    """The remainder at the end of a row is never written: it holds whatever was there before."""

    class AveragePool(right.AveragePool):
        @staticmethod
        def backward(ctx, grad):
            by_x = grad.new_empty(ctx.shape)
            by_x[..., : 2 * grad.shape[-1]] = grad.repeat_interleave(2, -1) / 2
            return by_x

    return AveragePool, [(normal(3, 6),), (normal(2, 5, seed=1),)]


@planted("top_k", "shape", input="x", also=("raises",))
def top_k_without_the_others() -> Any:
    """The gradient has as many columns as the result, and not as the input."""

    class TopK(right.TopK):
        @staticmethod
        def backward(ctx, grad, _):
            return grad.clone(), None

    return TopK, [(normal(3, 5), 2)]


@planted("sort", "unknown", input="x", also=("shifted",))
def sort_that_gathers() -> Any:
    """The order is applied to the gradient again, where its inverse belongs."""

    class Sort(right.Sort):
        @staticmethod
        def backward(ctx, grad):
            (order,) = ctx.saved_tensors
            return grad.gather(-1, order)

    return Sort, [(normal(3, 5),)]


@planted("sort", "second-order", input="x", order=2)
def sort_that_detaches() -> Any:
    """The gradient's own gradient is cut off: a penalty on gradients trains nothing."""

    class Sort(right.Sort):
        @staticmethod
        def backward(ctx, grad):
            (order,) = ctx.saved_tensors
            return torch.zeros_like(grad).scatter(-1, order, grad.data)

    return Sort, [(normal(3, 5),)]


@planted("rotary", "unknown", input="x", also=("region",))
def rotary_turned_further() -> Any:
    """The gradient is turned like the input, where it must be turned back."""

    class Rotary(right.Rotary):
        @staticmethod
        def backward(ctx, grad):
            cos, sin = right.angles(grad, ctx.base)
            first, second = grad.chunk(2, -1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1), None

    return Rotary, [(normal(2, 3, 4), 100.0)]


@planted("triangle", "region", input="x")
def lower_triangle_without_diagonal() -> Any:
    class LowerTriangle(right.LowerTriangle):
        @staticmethod
        def backward(ctx, grad):
            return grad.tril(-1)

    return LowerTriangle, [(normal(4, 4),)]


@planted("upsample", "unreduced-broadcast", input="x", also=("missing-term",))
def upsample_that_reads_every_second() -> Any:
    class UpsampleNearest(right.UpsampleNearest):
        @staticmethod
        def backward(ctx, grad):
            return grad[..., :: ctx.factor].contiguous(), None

    return UpsampleNearest, [(normal(2, 3), 2)]


@planted("upsample", "raises", input="x")
def upsample_by_one_raises() -> Any:
    """A name that is only there in one of two branches."""

    class UpsampleNearest(Function):
        @staticmethod
        def forward(ctx, x, factor):
            ctx.factor = factor
            if factor == 1:
                return x.clone()
            ctx.columns = x.shape[-1]
            return x.repeat_interleave(factor, -1)

        @staticmethod
        def backward(ctx, grad):
            return grad.unflatten(-1, (ctx.columns, ctx.factor)).sum(-1), None

    return UpsampleNearest, [(normal(2, 3), 2), (normal(2, 3), 1)]
