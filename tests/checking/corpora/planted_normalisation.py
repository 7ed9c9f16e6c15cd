"""Planted: `autograd.Function`s that normalise, and forget a part of what that does to the gradient."""

from typing import Any

import sound_normalisation as right
import torch
from entries import planted
from heldout_numbers import normal
from torch.autograd import Function


@planted("layer_norm", "missing-term", input="x")
def layer_norm_of_constant_deviation() -> Any:
    class LayerNorm(right.LayerNorm):
        @staticmethod
        def backward(ctx, grad):
            _, by_weight, by_bias, _ = right.LayerNorm.backward(ctx, grad)
            x, weight = ctx.saved_tensors
            rstd = (x.var(-1, correction=0, keepdim=True) + ctx.eps).rsqrt()
            by_x_hat = grad * weight
            return rstd * (by_x_hat - by_x_hat.mean(-1, keepdim=True)), by_weight, by_bias, None

    return LayerNorm, [(normal(4, 5), 1 + 0.1 * normal(5, seed=1), normal(5, seed=2), 1e-5)]


@planted("layer_norm", "second-order", input="x", order=2)
def layer_norm_of_saved_statistics() -> Any:
    """Mean and deviation are saved, as for speed, and stand for constants in the second order."""

    class LayerNorm(Function):
        @staticmethod
        def forward(ctx, x, weight, bias, eps):
            mean = x.mean(-1, keepdim=True)
            rstd = (x.var(-1, correction=0, keepdim=True) + eps).rsqrt()
            ctx.save_for_backward(x, weight, mean, rstd)
            return (x - mean) * rstd * weight + bias

        @staticmethod
        def backward(ctx, grad):
            x, weight, mean, rstd = ctx.saved_tensors
            x_hat = (x - mean) * rstd
            by_x_hat = grad * weight
            along = (by_x_hat * x_hat).mean(-1, keepdim=True)
            by_x = rstd * (by_x_hat - by_x_hat.mean(-1, keepdim=True) - x_hat * along)
            return by_x, (grad * x_hat).sum(0), grad.sum(0), None

    return LayerNorm, [(normal(4, 5), 1 + 0.1 * normal(5, seed=1), normal(5, seed=2), 1e-5)]


@planted("layer_norm", "gradient-count")
def layer_norm_without_none_for_eps() -> Any:
    class LayerNorm(right.LayerNorm):
        @staticmethod
        def backward(ctx, grad):
            by_x, by_weight, by_bias, _ = right.LayerNorm.backward(ctx, grad)
            return by_x, by_weight, by_bias

    return LayerNorm, [(normal(4, 5), 1 + 0.1 * normal(5, seed=1), normal(5, seed=2), 1e-5)]


@planted("rms_norm", "missing-term", input="x")
def rms_norm_of_constant_root() -> Any:
    class RMSNorm(right.RMSNorm):
        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            rstd = (x.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
            return grad * weight * rstd, (grad * x * rstd).sum(0), None

    return RMSNorm, [(normal(4, 6), 1 + 0.1 * normal(6, seed=1), 1e-6)]


@planted("rms_norm", "dtype", input="result", also=("precision",))
def rms_norm_that_stays_in_float32() -> Any:
    """Computed in float32, as it is done for bfloat16, and never cast back."""

    class RMSNorm(Function):
        @staticmethod
        def forward(ctx, x, weight, eps):
            ctx.save_for_backward(x, weight)
            ctx.eps = eps
            wide = x.to(torch.float32)
            return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(torch.float32)

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            grad = grad.to(x.dtype)
            rstd = (x.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
            by_x_hat, x_hat = grad * weight, x * rstd
            by_x = rstd * (by_x_hat - x_hat * (by_x_hat * x_hat).mean(-1, keepdim=True))
            return by_x, (grad * x_hat).sum(0), None

    return RMSNorm, [(normal(4, 6), 1 + 0.1 * normal(6, seed=1), 1e-6)]


@planted("rms_norm", "precision", input="x")
def rms_norm_backward_through_bfloat16() -> Any:
    """A rounding that is meant for half precision training is applied to every dtype."""

    class RMSNorm(right.RMSNorm):
        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            rstd = (x.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
            by_x_hat, x_hat = grad * weight, x * rstd
            narrow = (by_x_hat - x_hat * (by_x_hat * x_hat).mean(-1, keepdim=True)).to(torch.bfloat16)
            return rstd * narrow.to(x.dtype), (grad * x_hat).sum(0), None

    return RMSNorm, [(normal(4, 6), 1 + 0.1 * normal(6, seed=1), 1e-6)]


@planted("normalize", "missing-term", input="x")
def normalize_without_projection() -> Any:
    class Normalize(right.Normalize):
        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad / x.square().sum(-1, keepdim=True).sqrt().clamp(min=ctx.eps), None

    return Normalize, [(normal(3, 4), 1e-12)]


@planted("softmax", "missing-term", input="x")
def softmax_of_the_diagonal() -> Any:
    """The derivative of the logistic function, as if the other elements did not move."""

    class Softmax(right.Softmax):
        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            return grad * y * (1 - y)

    return Softmax, [(normal(3, 5),), (normal(2, 3, 4, seed=1),)]


@planted("softmax", "mutates-input", input="x")
def softmax_that_shifts_its_input() -> Any:
    class Softmax(Function):
        @staticmethod
        def forward(ctx, x):
            x -= x.amax(-1, keepdim=True)
            y = x.exp()
            y = y / y.sum(-1, keepdim=True)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            return y * (grad - (grad * y).sum(-1, keepdim=True))

    return Softmax, [(normal(3, 5),)]


@planted("softmax", "mutates-saved")
def softmax_that_uses_its_result_up() -> Any:
    """The gradient is written over the result, which the caller holds as well."""

    class Softmax(right.Softmax):
        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            total = (grad * y).sum(-1, keepdim=True)
            return y.mul_(grad - total)

    return Softmax, [(normal(3, 5),)]


@planted("softmax", "empty", input="x", also=("raises",))
def softmax_that_looks_at_the_largest() -> Any:
    """A guard against infinite numbers that takes it for granted that there is a largest one."""

    class Softmax(right.Softmax):
        @staticmethod
        def forward(ctx, x):
            if x.max() == float("inf"):
                raise OverflowError("Softmax: infinite logits")
            return right.Softmax.forward(ctx, x)

    return Softmax, [(normal(3, 5),), (normal(2, 3, 4, seed=1),)]


@planted("logsumexp", "nan", input="x")
def logsumexp_whose_backward_overflows() -> Any:
    """The forward takes the largest out, the backward does not."""

    class LogSumExp(right.LogSumExp):
        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            e = x.exp()
            return grad.unsqueeze(ctx.dim) * e / e.sum(ctx.dim, keepdim=True), None

    return LogSumExp, [(normal(3, 4), -1), (normal(2, 3, 4, seed=1), 1)]


@planted("logsumexp", "raises", input="x", also=("shape",))
def logsumexp_for_the_last_dimension_alone() -> Any:
    """The grad_output is put back at the end, wherever it was taken from."""

    class LogSumExp(right.LogSumExp):
        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad.unsqueeze(-1) * x.softmax(ctx.dim), None

    return LogSumExp, [(normal(3, 4), -1), (normal(2, 3, 4, seed=1), 1)]


@planted("standardize", "unknown", input="x", also=("scale",))
def standardize_with_the_other_count() -> Any:
    """Forward with n - 1, backward with n: one of three terms is slightly too small."""

    class Standardize(right.Standardize):
        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            std = (x.var(0) + ctx.eps).sqrt()
            centred = x - x.mean(0)
            along = (grad * centred).mean(0) / std.square()
            return (grad - grad.mean(0) - centred * along) / std, None

    return Standardize, [(normal(6, 3), 1e-5)]


@planted("film", "missing-gradient", input="shift")
def film_without_shift() -> Any:
    class FiLM(right.FiLM):
        @staticmethod
        def backward(ctx, grad):
            x, scale = ctx.saved_tensors
            return grad * scale[:, :, None], (grad * x).sum(2), torch.zeros_like(scale)

    return FiLM, [(normal(2, 3, 4), normal(2, 3, seed=1), normal(2, 3, seed=2))]


@planted("film", "scale", input="scale")
def film_averaged_over_positions() -> Any:
    class FiLM(right.FiLM):
        @staticmethod
        def backward(ctx, grad):
            x, scale = ctx.saved_tensors
            return grad * scale[:, :, None], (grad * x).mean(2), grad.sum(2)

    return FiLM, [(normal(2, 3, 4), normal(2, 3, seed=1), normal(2, 3, seed=2))]


@planted("film", "unreduced-broadcast", input="scale", also=("shape",))
def film_summed_over_nothing() -> Any:
    """The gradient of the scale has the positions still in it, and the engine refuses it."""

    class FiLM(right.FiLM):
        @staticmethod
        def backward(ctx, grad):
            x, scale = ctx.saved_tensors
            return grad * scale[:, :, None], grad * x, grad.sum(2)

    return FiLM, [(normal(2, 3, 4), normal(2, 3, seed=1), normal(2, 3, seed=2))]
