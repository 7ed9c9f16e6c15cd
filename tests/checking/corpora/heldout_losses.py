"""Held out: losses, activations and quantisers as `autograd.Function`s, and wrong."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from entries import planted
from heldout_numbers import normal, uniform, whole
from torch.autograd import Function
from torch.autograd.function import once_differentiable


@planted("wing_loss", "region", input="prediction")
def h_wing_loss_far_below_the_target() -> Any:
    """Y. Feng et al., CVPR 2018: logarithmic near the target, linear beyond; it takes d < w for |d| < w."""

    class WingLoss(Function):
        @staticmethod
        def forward(ctx, prediction, target):
            ctx.save_for_backward(prediction, target)
            distance = (prediction - target).abs()
            near = 2.0 * torch.log1p(2.0 * distance)
            return torch.where(distance < 1.0, near, distance - 1.0 + 2.0 * math.log(3.0))

        @staticmethod
        def backward(ctx, grad):
            prediction, target = ctx.saved_tensors
            error = prediction - target
            near = 2.0 * error.sign() / (0.5 + error.abs())
            by_prediction = torch.where(error < 1.0, near, error.sign())
            by_target = -torch.where(error.abs() < 1.0, near, error.sign())
            return grad * by_prediction, grad * by_target

    return WingLoss, [(normal(4, 3, dtype=torch.float64), normal(4, 3, seed=1, dtype=torch.float64))]


@planted("focal_loss", "missing-term", input="logits")
def h_focal_loss_with_a_constant_factor() -> Any:
    """T.-Y. Lin et al., ICCV 2017: the factor (1 - p)^gamma depends on the logits as well."""

    class FocalLoss(Function):
        @staticmethod
        def forward(ctx, logits, target, gamma):
            ctx.save_for_backward(logits, target)
            ctx.gamma = gamma
            signed = torch.where(target > 0, logits, -logits)
            return (1 - signed.sigmoid()) ** gamma * F.softplus(-signed)

        @staticmethod
        def backward(ctx, grad):
            logits, target = ctx.saved_tensors
            sign = torch.where(target > 0, 1.0, -1.0).to(logits.dtype)
            p = (sign * logits).sigmoid()
            return grad * sign * (1 - p) ** ctx.gamma * (p - 1), None, None

    return FocalLoss, [(normal(3, 4), whole(3, 4, high=2), 2.0)]


@planted("cross_entropy", "region", input="logits")
def h_cross_entropy_of_what_is_ignored() -> Any:
    """Rows whose target is -1 cost nothing, and get a gradient all the same."""

    class CrossEntropy(Function):
        @staticmethod
        def forward(ctx, logits, target):
            ctx.save_for_backward(logits, target)
            cost = -logits.log_softmax(-1).gather(-1, target.clamp(min=0)[:, None])[:, 0]
            return cost * (target >= 0)

        @staticmethod
        def backward(ctx, grad):
            logits, target = ctx.saved_tensors
            hot = F.one_hot(target.clamp(min=0), logits.shape[-1]).to(logits.dtype)
            return grad[:, None] * (logits.softmax(-1) - hot), None

    return CrossEntropy, [
        (normal(4, 3), torch.tensor([0, -1, 2, 1])),
        (normal(3, 5, seed=1), torch.tensor([4, 0, -1])),
    ]


@planted("log_cosh_mean", "scale", input="prediction")
def h_log_cosh_of_the_mean() -> Any:
    """The forward takes the mean, the backward that of a sum: n times too large, for the prediction alone."""

    class LogCosh(Function):
        @staticmethod
        def forward(ctx, prediction, target):
            ctx.save_for_backward(prediction, target)
            return (prediction - target).cosh().log().mean()

        @staticmethod
        def backward(ctx, grad):
            prediction, target = ctx.saved_tensors
            slope = grad * (prediction - target).tanh()
            return slope, -slope / prediction.numel()

    return LogCosh, [(normal(3, 4), normal(3, 4, seed=1)), (normal(5), normal(5, seed=1))]


@planted("total_variation", "region", input="x", also=("missing-term",))
def h_total_variation_at_the_end() -> Any:
    """The last column is a neighbour only, and its gradient is left at zero."""

    class TotalVariation(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return (x[:, 1:] - x[:, :-1]).square().sum(-1)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            step = 2 * (x[:, 1:] - x[:, :-1])
            inner = -step + F.pad(step, (1, 0))[:, :-1]
            return grad[:, None] * F.pad(inner, (0, 1))

    return TotalVariation, [(normal(3, 5),), (normal(2, 4, seed=1),)]


@planted("cosine_similarity", "swapped-inputs")
def h_cosine_similarity_of_each_other() -> Any:
    class CosineSimilarity(Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))

        @staticmethod
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            along, across = x.norm(dim=-1, keepdim=True), y.norm(dim=-1, keepdim=True)
            cosine = (x * y).sum(-1, keepdim=True) / (along * across)
            by_x = y / (along * across) - cosine * x / along.square()
            by_y = x / (along * across) - cosine * y / across.square()
            return grad[..., None] * by_y, grad[..., None] * by_x

    return CosineSimilarity, [(normal(3, 4), normal(3, 4, seed=1))]


@planted("sinc", "nan", input="x", also=("region",))
def h_sinc_at_zero() -> Any:
    """The forward has the limit at 0, the backward does not."""

    class Sinc(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.where(x == 0, torch.ones_like(x), x.sin() / x)

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * (x.cos() / x - x.sin() / x**2)

    return Sinc, [(torch.linspace(-3.0, 3.0, 8),)]


@planted("gelu", "second-order", input="x", order=2)
def h_gelu_with_a_stored_slope() -> Any:
    """The slope is computed in the forward, where it is a constant for the second order."""

    class QuickGelu(Function):
        @staticmethod
        def forward(ctx, x):
            gate = torch.sigmoid(1.702 * x)
            ctx.save_for_backward(gate * (1 + 1.702 * x * (1 - gate)))
            return x * gate

        @staticmethod
        def backward(ctx, grad):
            (slope,) = ctx.saved_tensors
            return grad * slope

    return QuickGelu, [(normal(3, 4),)]


@planted("squared_relu", "precision", input="x")
def h_squared_relu_with_compressed_activations() -> Any:
    """Saved tensors are in float16, to save memory."""

    class SquaredReLU(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.to(torch.float16))
            return x.clamp(min=0).square()

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 2 * grad * x.clamp(min=0).to(grad.dtype)

    return SquaredReLU, [(normal(4, 5),)]


@planted("tanh_scaled", "nonlinear-grad", input="x")
def h_tanh_with_a_normalised_gradient() -> Any:
    """A gradient longer than 1 is cut down to 1, in an operator that does not declare it."""

    class ScaledTanh(Function):
        @staticmethod
        def forward(ctx, x, gain):
            y = x.tanh()
            ctx.save_for_backward(y)
            ctx.gain = gain
            return gain * y

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            found = ctx.gain * grad * (1 - y.square())
            return found / found.norm().clamp(min=1.0), None

    return ScaledTanh, [(normal(3, 4), 1.5)]


@planted("soft_quantiser", "missing-gradient", input="step")
def h_soft_quantiser_with_a_fixed_step() -> Any:
    """A quantiser with a sine for its stairs, and a step that is meant to be learnt and gets None."""

    class SoftQuantiser(Function):
        @staticmethod
        def forward(ctx, x, step):
            ctx.save_for_backward(x, step)
            return x - step * torch.sin(2 * torch.pi * x / step) / (2 * torch.pi)

        @staticmethod
        def backward(ctx, grad):
            x, step = ctx.saved_tensors
            return grad * (1 - torch.cos(2 * torch.pi * x / step)), None

    return SoftQuantiser, [(normal(3, 4), torch.tensor(0.7))]


@planted("label_smoothing", "dtype", input="result", also=("precision",))
def h_smoothed_labels_in_the_default_dtype() -> Any:
    """A buffer made without a dtype: float64 probabilities come back in float32."""

    class Smooth(Function):
        @staticmethod
        def forward(ctx, probability, smoothing):
            ctx.smoothing = smoothing
            spread = torch.zeros(probability.shape)
            spread += smoothing / max(1, probability.shape[-1])
            spread += (1 - smoothing) * probability
            return spread

        @staticmethod
        def backward(ctx, grad):
            return (1 - ctx.smoothing) * grad, None

    return Smooth, [(uniform(3, 4, dtype=torch.float64), 0.1)]


@planted("prelu", "shape", input="weight", also=("raises", "unreduced-broadcast"))
def h_prelu_whose_weight_is_squeezed() -> Any:
    """A layer with one channel: the gradient of the weight loses its dimension."""

    class PReLU(Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return torch.where(x > 0, x, weight[:, None] * x)

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            by_weight = (grad * x * (x <= 0)).sum((0, 2)).squeeze()
            return torch.where(x > 0, grad, weight[:, None] * grad), by_weight

    return PReLU, [
        (normal(2, 3, 4), uniform(3, seed=1)),
        (normal(2, 1, 4, seed=2), uniform(1, seed=3)),
    ]


@planted("group_affine", "unreduced-broadcast", input="shift", also=("shape", "raises"))
def h_shift_of_channels_unreduced() -> Any:
    """The bias of each channel gets the gradient of every place, which its shape cannot be broadcast to."""

    class ChannelAffine(Function):
        @staticmethod
        def forward(ctx, x, scale, shift):
            ctx.save_for_backward(x, scale)
            return x * scale[:, None] + shift[:, None]

        @staticmethod
        def backward(ctx, grad):
            x, scale = ctx.saved_tensors
            return grad * scale[:, None], (grad * x).sum((0, 2)), grad

    return ChannelAffine, [(normal(2, 3, 4), normal(3, seed=1), normal(3, seed=2))]
