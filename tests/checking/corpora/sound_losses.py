"""Right `autograd.Function`s of losses; `planted_losses` breaks them one by one."""

from typing import Any

import torch
import torch.nn.functional as F
from entries import sound
from heldout_numbers import normal, whole
from torch.autograd import Function


class CrossEntropy(Function):
    """The mean over the rows."""

    @staticmethod
    def forward(ctx, logits, target):
        logp = logits.log_softmax(-1)
        ctx.save_for_backward(logits, target)
        return -logp.gather(1, target[:, None]).mean()

    @staticmethod
    def backward(ctx, grad):
        logits, target = ctx.saved_tensors
        hot = F.one_hot(target, logits.shape[1]).to(logits.dtype)
        return grad * (logits.softmax(-1) - hot) / logits.shape[0], None


class Huber(Function):
    @staticmethod
    def forward(ctx, prediction, target, delta):
        ctx.save_for_backward(prediction, target)
        ctx.delta = delta
        error = (prediction - target).abs()
        return torch.where(error <= delta, 0.5 * error * error, delta * (error - 0.5 * delta))

    @staticmethod
    def backward(ctx, grad):
        prediction, target = ctx.saved_tensors
        slope = (prediction - target).clamp(-ctx.delta, ctx.delta)
        return grad * slope, -grad * slope, None


class SigmoidFocal(Function):
    """T.-Y. Lin et al., ICCV 2017, for a target of zeros and ones."""

    @staticmethod
    def forward(ctx, logits, target, gamma):
        ctx.save_for_backward(logits, target)
        ctx.gamma = gamma
        signed = logits * (2 * target - 1)
        return torch.sigmoid(-signed) ** gamma * F.softplus(-signed)

    @staticmethod
    def backward(ctx, grad):
        logits, target = ctx.saved_tensors
        side = 2 * target - 1
        signed = logits * side
        miss = torch.sigmoid(-signed)
        inner = -ctx.gamma * miss**ctx.gamma * (1 - miss) * F.softplus(-signed) - miss ** (ctx.gamma + 1)
        return grad * side * inner, None, None


class Dice(Function):
    """One minus the overlap of probabilities with a mask, for each row."""

    @staticmethod
    def forward(ctx, p, mask, eps):
        mask = mask.to(p.dtype)
        ctx.eps = eps
        ctx.save_for_backward(p, mask)
        return 1 - (2 * (p * mask).sum(-1) + eps) / (p.sum(-1) + mask.sum(-1) + eps)

    @staticmethod
    def backward(ctx, grad):
        p, mask = ctx.saved_tensors
        top = 2 * (p * mask).sum(-1, keepdim=True) + ctx.eps
        bottom = p.sum(-1, keepdim=True) + mask.sum(-1, keepdim=True) + ctx.eps
        return grad[..., None] * (top - 2 * mask * bottom) / bottom.square(), None, None


class BinaryCrossEntropy(Function):
    """Of logits, in the form that does not overflow."""

    @staticmethod
    def forward(ctx, logits, target):
        ctx.save_for_backward(logits, target)
        return logits.clamp(min=0) - logits * target + torch.log1p((-logits.abs()).exp())

    @staticmethod
    def backward(ctx, grad):
        logits, target = ctx.saved_tensors
        return grad * (torch.sigmoid(logits) - target), -grad * logits


class MeanSquare(Function):
    @staticmethod
    def forward(ctx, prediction, target):
        ctx.save_for_backward(prediction, target)
        return (prediction - target).square().mean()

    @staticmethod
    def backward(ctx, grad):
        prediction, target = ctx.saved_tensors
        slope = 2 * grad * (prediction - target) / prediction.numel()
        return slope, -slope


@sound
def cross_entropy() -> Any:
    return CrossEntropy, [(normal(4, 5), whole(4, high=5))]


@sound
def huber() -> Any:
    return Huber, [(normal(3, 4), normal(3, 4, seed=1), 1.0)]


@sound
def sigmoid_focal_loss() -> Any:
    return SigmoidFocal, [(normal(3, 4), whole(3, 4, high=2), 2.0)]


@sound
def dice() -> Any:
    return Dice, [(normal(3, 6).sigmoid(), whole(3, 6, high=2), 1.0)]


@sound
def binary_cross_entropy() -> Any:
    return BinaryCrossEntropy, [(normal(3, 4), normal(3, 4, seed=1).sigmoid())]


@sound
def mean_square() -> Any:
    return MeanSquare, [(normal(3, 4), normal(3, 4, seed=1))]
