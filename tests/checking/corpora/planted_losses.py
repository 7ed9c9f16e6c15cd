"""Planted: losses as `autograd.Function`s, and what is often wrong with them."""

from typing import Any

import sound_losses as right
import torch
import torch.nn.functional as F
from entries import planted
from heldout_numbers import normal, whole
from torch.autograd import Function


@planted("cross_entropy", "ignores-grad-output", input="logits")
def cross_entropy_with_its_gradient_ready() -> Any:
    """The forward works the gradient out, and the backward hands it back as if the loss came last."""

    class CrossEntropy(Function):
        @staticmethod
        def forward(ctx, logits, target):
            logp = logits.log_softmax(-1)
            hot = F.one_hot(target, logits.shape[1]).to(logits.dtype)
            ctx.save_for_backward((logp.exp() - hot) / logits.shape[0])
            return -(logp * hot).sum() / logits.shape[0]

        @staticmethod
        def backward(ctx, grad):
            (by_logits,) = ctx.saved_tensors
            return by_logits, None

    return CrossEntropy, [(normal(4, 5), whole(4, high=5))]


@planted("cross_entropy", "scale", input="logits")
def cross_entropy_without_the_mean() -> Any:
    class CrossEntropy(right.CrossEntropy):
        @staticmethod
        def backward(ctx, grad):
            logits, target = ctx.saved_tensors
            hot = F.one_hot(target, logits.shape[1]).to(logits.dtype)
            return grad * (logits.softmax(-1) - hot), None

    return CrossEntropy, [(normal(4, 5), whole(4, high=5))]


@planted("cross_entropy", "second-order", input="logits", order=2)
def cross_entropy_detached() -> Any:
    class CrossEntropy(right.CrossEntropy):
        @staticmethod
        def backward(ctx, grad):
            logits, target = ctx.saved_tensors
            p = logits.detach().softmax(-1)
            p[torch.arange(len(target)), target] -= 1
            return grad * p / logits.shape[0], None

    return CrossEntropy, [(normal(4, 5), whole(4, high=5))]


@planted("huber", "sign", input="target")
def huber_pulls_the_target_along() -> Any:
    class Huber(right.Huber):
        @staticmethod
        def backward(ctx, grad):
            prediction, target = ctx.saved_tensors
            slope = (prediction - target).clamp(-ctx.delta, ctx.delta)
            return grad * slope, grad * slope, None

    return Huber, [(normal(3, 4), normal(3, 4, seed=1), 1.0)]


@planted("huber", "region")
def huber_quadratic_everywhere() -> Any:
    class Huber(right.Huber):
        @staticmethod
        def backward(ctx, grad):
            prediction, target = ctx.saved_tensors
            slope = prediction - target
            return grad * slope, -grad * slope, None

    return Huber, [(normal(3, 4), normal(3, 4, seed=1), 1.0)]


@planted("huber", "input-needs-grad", input="target")
def huber_that_packs_its_gradients() -> Any:
    """Only what is needed is returned, one after the other, so that it stands in the wrong places."""

    class Huber(right.Huber):
        @staticmethod
        def backward(ctx, grad):
            prediction, target = ctx.saved_tensors
            slope = (prediction - target).clamp(-ctx.delta, ctx.delta)
            found = []
            if ctx.needs_input_grad[0]:
                found.append(grad * slope)
            if ctx.needs_input_grad[1]:
                found.append(-grad * slope)
            return (*found, None, None)[:3]

    return Huber, [(normal(3, 4), normal(3, 4, seed=1), 1.0)]


@planted("focal_loss", "missing-term", input="logits")
def focal_loss_with_a_constant_weight() -> Any:
    class SigmoidFocal(right.SigmoidFocal):
        @staticmethod
        def backward(ctx, grad):
            logits, target = ctx.saved_tensors
            side = 2 * target - 1
            miss = torch.sigmoid(-logits * side)
            return -grad * side * miss ** (ctx.gamma + 1), None, None

    return SigmoidFocal, [(normal(3, 4), whole(3, 4, high=2), 2.0)]


@planted("focal_loss", "nonlinear-grad", input="logits")
def focal_loss_that_clips() -> Any:
    class SigmoidFocal(right.SigmoidFocal):
        @staticmethod
        def backward(ctx, grad):
            by_logits, _, _ = right.SigmoidFocal.backward(ctx, grad)
            return by_logits.clamp(-0.1, 0.1), None, None

    return SigmoidFocal, [(normal(3, 4), whole(3, 4, high=2), 2.0)]


@planted("dice", "missing-term", input="p")
def dice_of_constant_size() -> Any:
    """The quotient rule is used for the numerator alone."""

    class Dice(right.Dice):
        @staticmethod
        def backward(ctx, grad):
            p, mask = ctx.saved_tensors
            bottom = p.sum(-1, keepdim=True) + mask.sum(-1, keepdim=True) + ctx.eps
            return -2 * grad[..., None] * mask / bottom, None, None

    return Dice, [(normal(3, 6).sigmoid(), whole(3, 6, high=2), 1.0)]


@planted("binary_cross_entropy", "nan", input="logits")
def binary_cross_entropy_that_overflows() -> Any:
    class BinaryCrossEntropy(right.BinaryCrossEntropy):
        @staticmethod
        def backward(ctx, grad):
            logits, target = ctx.saved_tensors
            e = logits.exp()
            return grad * (e / (1 + e) - target), -grad * logits

    return BinaryCrossEntropy, [(normal(3, 4), normal(3, 4, seed=1).sigmoid())]


@planted("mean_square", "scale", input="prediction")
def mean_square_without_two() -> Any:
    class MeanSquare(right.MeanSquare):
        @staticmethod
        def backward(ctx, grad):
            prediction, target = ctx.saved_tensors
            slope = grad * (prediction - target) / prediction.numel()
            return slope, -2 * slope

    return MeanSquare, [(normal(3, 4), normal(3, 4, seed=1))]


@planted("mean_square", "scale")
def mean_square_of_the_first_size() -> Any:
    """The mean is over all elements, and the gradient is divided by the number of rows."""

    class MeanSquare(right.MeanSquare):
        @staticmethod
        def backward(ctx, grad):
            prediction, target = ctx.saved_tensors
            slope = 2 * grad * (prediction - target) / prediction.size(0)
            return slope, -slope

    return MeanSquare, [(normal(3, 4), normal(3, 4, seed=1))]


@planted("l1_penalty", "ignores-grad-output", input="x")
def penalty_that_is_always_added() -> Any:
    """A sparsity penalty that hands its own slope back, whatever weight the loss gives it."""

    class Penalty(Function):
        @staticmethod
        def forward(ctx, x, strength):
            ctx.save_for_backward(x)
            ctx.strength = strength
            return strength * x.abs().sum()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return ctx.strength * x.sign(), None

    return Penalty, [(normal(3, 4), 0.1)]
