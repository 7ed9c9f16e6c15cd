"""Right `autograd.Function`s that normalise; `planted_normalisation` breaks them one by one."""

from typing import Any

import torch
from entries import sound
from heldout_numbers import normal
from torch.autograd import Function


class LayerNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        centred = x - x.mean(-1, keepdim=True)
        rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
        return centred * rstd * weight + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        centred = x - x.mean(-1, keepdim=True)
        rstd = (centred.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
        x_hat = centred * rstd
        by_x_hat = grad * weight
        along = (by_x_hat * x_hat).mean(-1, keepdim=True)
        by_x = rstd * (by_x_hat - by_x_hat.mean(-1, keepdim=True) - x_hat * along)
        return by_x, (grad * x_hat).sum(0), grad.sum(0), None


class RMSNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        rstd = (x.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
        by_x_hat = grad * weight
        x_hat = x * rstd
        by_x = rstd * (by_x_hat - x_hat * (by_x_hat * x_hat).mean(-1, keepdim=True))
        return by_x, (grad * x_hat).sum(0), None


class Normalize(Function):
    """Rows of length one."""

    @staticmethod
    def forward(ctx, x, eps):
        norm = x.square().sum(-1, keepdim=True).sqrt().clamp(min=eps)
        ctx.save_for_backward(x)
        ctx.eps = eps
        return x / norm

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        norm = x.square().sum(-1, keepdim=True).sqrt()
        inside = norm > ctx.eps
        y = x / norm.clamp(min=ctx.eps)
        turned = grad - torch.where(inside, y * (grad * y).sum(-1, keepdim=True), 0.0)
        return turned / norm.clamp(min=ctx.eps), None


class Softmax(Function):
    @staticmethod
    def forward(ctx, x):
        y = (x - x.amax(-1, keepdim=True)).exp()
        y = y / y.sum(-1, keepdim=True)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return y * (grad - (grad * y).sum(-1, keepdim=True))


class LogSumExp(Function):
    @staticmethod
    def forward(ctx, x, dim):
        top = x.amax(dim, keepdim=True)
        y = (x - top).exp().sum(dim, keepdim=True).log() + top
        ctx.dim = dim
        ctx.save_for_backward(x)
        return y.squeeze(dim)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad.unsqueeze(ctx.dim) * x.softmax(ctx.dim), None


class Standardize(Function):
    """To mean zero and variance one over the batch, with n - 1 below the variance."""

    @staticmethod
    def forward(ctx, x, eps):
        std = (x.var(0) + eps).sqrt()
        ctx.eps = eps
        ctx.save_for_backward(x)
        return (x - x.mean(0)) / std

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        n = x.shape[0]
        std = (x.var(0) + ctx.eps).sqrt()
        centred = x - x.mean(0)
        along = (grad * centred).sum(0) / ((n - 1) * std.square())
        return (grad - grad.mean(0) - centred * along) / std, None


class FiLM(Function):
    """Scales and shifts each channel, dimension 1, by what belongs to the example."""

    @staticmethod
    def forward(ctx, x, scale, shift):
        ctx.save_for_backward(x, scale)
        return x * scale[:, :, None] + shift[:, :, None]

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        return grad * scale[:, :, None], (grad * x).sum(2), grad.sum(2)


@sound
def layer_norm() -> Any:
    return LayerNorm, [(normal(4, 5), 1 + 0.1 * normal(5, seed=1), normal(5, seed=2), 1e-5)]


@sound
def rms_norm() -> Any:
    return RMSNorm, [(normal(4, 6), 1 + 0.1 * normal(6, seed=1), 1e-6)]


@sound
def normalize() -> Any:
    return Normalize, [(normal(3, 4), 1e-12)]


@sound
def softmax() -> Any:
    return Softmax, [(normal(3, 5),), (normal(2, 3, 4, seed=1),)]


@sound
def logsumexp() -> Any:
    return LogSumExp, [(normal(3, 4), -1), (normal(2, 3, 4, seed=1), 1)]


@sound
def standardize() -> Any:
    return Standardize, [(normal(6, 3), 1e-5)]


@sound
def film() -> Any:
    return FiLM, [(normal(2, 3, 4), normal(2, 3, seed=1), normal(2, 3, seed=2))]
