"""Planted: `autograd.Function`s that are right for the tensors that gradcheck makes, and for few others."""

import math
from typing import Any

import sound_activations as activations
import sound_normalisation as normalisation
import torch
import torch.nn.functional as F
from entries import planted
from heldout_numbers import normal
from torch.autograd import Function
from torch.autograd.function import once_differentiable


@planted("swish", "layout", input="x")
def swish_of_raw_memory_of_grad() -> Any:
    """As a kernel that is given `grad.data_ptr()` and a number of elements reads it."""

    class Swish(activations.Swish):
        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            rows = [math.prod(grad.shape[at + 1 :]) for at in range(grad.dim())]
            fits = grad.untyped_storage().nbytes() // grad.element_size() >= grad.numel()
            raw = grad.as_strided(grad.shape, rows) if fits else grad.contiguous()
            s = torch.sigmoid(x)
            return raw * (s * (1 + x * (1 - s)))

    return Swish, [(normal(3, 4),)]


@planted("gelu", "layout", input="x")
def gelu_that_begins_at_the_storage() -> Any:
    """The forward goes to the storage and forgets where in it the tensor begins."""

    class Gelu(Function):
        @staticmethod
        def forward(ctx, x):
            x = x.contiguous()
            raw = torch.as_strided(x, x.shape, x.stride(), 0)
            ctx.save_for_backward(raw)
            return raw * 0.5 * (1 + torch.erf(raw / math.sqrt(2)))

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            cdf = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
            return grad * (cdf + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))

    return Gelu, [(normal(3, 4),)]


@planted("mish", "layout", input="x")
def mish_into_memory_like_its_input() -> Any:
    """`empty_like` keeps the order of dimensions in memory, and a loop fills the memory from its start."""

    class Mish(activations.Mish):
        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            found = activations.Mish.backward(ctx, grad)
            by_x = torch.empty_like(x)
            by_x.as_strided((x.numel(),), (1,)).copy_(found.reshape(-1))
            return by_x

    return Mish, [(normal(2, 3, 4, 4),)]


@planted("channel_scale", "layout", input="x")
def channel_scale_for_one_memory_format() -> Any:
    """The channels of element i are i // (H W) % C, which channels-last images are not."""

    class ChannelScale(Function):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.save_for_backward(x, scale)
            return x * scale[:, None, None]

        @staticmethod
        def backward(ctx, grad):
            x, scale = ctx.saved_tensors
            _, channels, height, width = grad.shape
            by_scale = (grad * x).sum((0, 2, 3))
            order = torch.arange(grad.numel()) // (height * width) % channels
            dense = grad if grad.is_contiguous(memory_format=torch.channels_last) else grad.contiguous()
            flat = dense.as_strided((dense.numel(),), (1,)) * scale[order]
            return flat.as_strided(grad.shape, dense.stride()), by_scale

    return ChannelScale, [(normal(2, 3, 4, 4), normal(3, seed=1))]


@planted("reshape", "layout", input="x", also=("raises",))
def flatten_that_views() -> Any:
    class Flatten(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.shape = x.shape
            return x.view(x.shape[0], math.prod(x.shape[1:])).clone()

        @staticmethod
        def backward(ctx, grad):
            return grad.reshape(ctx.shape)

    return Flatten, [(normal(2, 3, 4),)]


@planted("rms_norm", "layout", input="x")
def rms_norm_that_trusts_the_row_stride() -> Any:
    """Rows are taken to lie one behind the other: right for rows that are contiguous, in any place."""

    class RMSNorm(normalisation.RMSNorm):
        @staticmethod
        def backward(ctx, grad):
            rows, columns = grad.shape
            if grad.stride(1) == 1 and rows > 1 and grad.stride(0) > columns:
                grad = grad.as_strided((rows, columns), (columns, 1))
            return normalisation.RMSNorm.backward(ctx, grad)

    return RMSNorm, [(normal(4, 6), 1 + 0.1 * normal(6, seed=1), 1e-6)]


@planted("gelu", "precision", input="x")
def gelu_backward_in_float32() -> Any:
    class Gelu(activations.Gelu):
        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            wide = x.float()
            cdf = 0.5 * (1 + torch.erf(wide / math.sqrt(2)))
            slope = cdf + wide * torch.exp(-0.5 * wide * wide) / math.sqrt(2 * math.pi)
            return (grad.float() * slope).to(x.dtype)

    return Gelu, [(normal(3, 4, dtype=torch.float64),)]


@planted("cross_correlation", "precision", input="weight")
def correlation_that_accumulates_in_half() -> Any:
    """The gradient of the weight is summed over the batch in half precision, whatever comes in."""

    class Correlation(Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad * weight, (grad * x).to(torch.float16).sum(0).to(weight.dtype)

    return Correlation, [(normal(5, 3), normal(3, seed=1))]


@planted("one_hot_mix", "dtype", input="result", also=("precision",))
def mix_into_the_default_dtype() -> Any:
    """The result is made by `torch.zeros` and filled, and has torch's default dtype for every input."""

    class Place(Function):
        @staticmethod
        def forward(ctx, x, index, size):
            ctx.save_for_backward(index)
            ctx.dtype = x.dtype
            y = torch.zeros(x.shape[0], size)
            y[:, index] = x.to(y.dtype)
            return y

        @staticmethod
        def backward(ctx, grad):
            (index,) = ctx.saved_tensors
            return grad[:, index].to(ctx.dtype), None, None

    return Place, [(normal(3, 2), torch.tensor([3, 0]), 5)]


@planted("rows", "empty", input="x", also=("raises",))
def rows_that_are_stacked() -> Any:
    """A loop over rows, and nothing to stack where there are none."""

    class RowSoftmax(Function):
        @staticmethod
        def forward(ctx, x):
            y = torch.stack([row.softmax(0) for row in x])
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            return y * (grad - (grad * y).sum(-1, keepdim=True))

    return RowSoftmax, [(normal(3, 4),)]


@planted("linear", "empty", input="weight")
def linear_that_returns_early() -> Any:
    """Without rows there is nothing to do, and what is returned was never written."""

    class Linear(Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight.mT

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            if x.shape[0] == 0:
                return torch.zeros_like(x), torch.ones_like(weight)
            return grad @ weight, grad.mT @ x

    return Linear, [(normal(4, 3), normal(2, 3, seed=1))]


@planted("sqrt", "nan", input="x", also=("region",))
def square_root_behind_a_mask() -> Any:
    """Zero times infinity: the mask comes too late."""

    class SafeSqrt(Function):
        @staticmethod
        def forward(ctx, x):
            y = x.clamp(min=0).sqrt()
            ctx.save_for_backward(x, y)
            return y

        @staticmethod
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            return grad * (x > 0) * 0.5 / y

    return SafeSqrt, [(normal(3, 4),)]


@planted("cdist", "nan", input="x")
def distances_of_points_that_meet() -> Any:
    """Each point from every other, and so from itself."""

    class Distances(Function):
        @staticmethod
        def forward(ctx, x):
            d = (x[:, None] - x[None]).square().sum(-1).sqrt()
            ctx.save_for_backward(x, d)
            return d

        @staticmethod
        def backward(ctx, grad):
            x, d = ctx.saved_tensors
            pull = (x[:, None] - x[None]) * (grad / d)[..., None]
            return pull.sum(1) - pull.sum(0)

    return Distances, [(normal(4, 3),)]


@planted("log_sigmoid", "nan", input="x", also=("region",))
def log_sigmoid_of_large_numbers() -> Any:
    class LogSigmoid(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return F.logsigmoid(x)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            e = (-x).exp()
            return grad * e / (1 + e)

    return LogSigmoid, [(normal(3, 4),)]
