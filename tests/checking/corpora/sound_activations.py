"""Right `autograd.Function`s of single numbers; `planted_activations` breaks them one by one."""

import math
from typing import Any

import torch
from entries import sound
from heldout_numbers import normal
from torch.autograd import Function


class Swish(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s * (1 + x * (1 - s)))


class Mish(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.tanh(torch.nn.functional.softplus(x))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        t = torch.tanh(torch.nn.functional.softplus(x))
        return grad * (t + x * torch.sigmoid(x) * (1 - t * t))


class Gelu(Function):
    """By the error function."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        cdf = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        return grad * (cdf + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))


class LeakyReLU(Function):
    @staticmethod
    def forward(ctx, x, slope):
        ctx.save_for_backward(x)
        ctx.slope = slope
        return torch.where(x > 0, x, slope * x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, grad, ctx.slope * grad), None


class PReLU(Function):
    """One slope for each channel, dimension 1."""

    @staticmethod
    def forward(ctx, x, slope):
        ctx.save_for_backward(x, slope)
        return torch.where(x > 0, x, slope[:, None] * x)

    @staticmethod
    def backward(ctx, grad):
        x, slope = ctx.saved_tensors
        by_x = torch.where(x > 0, grad, slope[:, None] * grad)
        return by_x, (grad * x.clamp(max=0)).sum((0, 2))


class HardTanh(Function):
    @staticmethod
    def forward(ctx, x, low, high):
        ctx.save_for_backward(x)
        ctx.low, ctx.high = low, high
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * ((x > ctx.low) & (x < ctx.high)), None, None


class Swiglu(Function):
    @staticmethod
    def forward(ctx, x, gate):
        ctx.save_for_backward(x, gate)
        return x * gate * torch.sigmoid(gate)

    @staticmethod
    def backward(ctx, grad):
        x, gate = ctx.saved_tensors
        s = torch.sigmoid(gate)
        return grad * gate * s, grad * x * s * (1 + gate * (1 - s))


class Exp(Function):
    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y

    @staticmethod
    def jvp(ctx, tangent):
        (y,) = ctx.saved_tensors
        return tangent * y


class Snake(Function):
    """L. Ziyin, T. Hartwig, M. Ueda, NeurIPS 2020: x + sin^2(a x) / a, with one a for all."""

    @staticmethod
    def forward(ctx, x, a):
        ctx.save_for_backward(x, a)
        return x + torch.sin(a * x).square() / a

    @staticmethod
    def backward(ctx, grad):
        x, a = ctx.saved_tensors
        wave = torch.sin(2 * a * x)
        by_a = grad * (x * wave / a - torch.sin(a * x).square() / (a * a))
        return grad * (1 + wave), by_a.sum()


@sound
def swish() -> Any:
    return Swish, [(normal(3, 4),)]


@sound
def mish() -> Any:
    return Mish, [(normal(3, 4),)]


@sound
def gelu() -> Any:
    return Gelu, [(normal(3, 4),), (normal(5, seed=1),)]


@sound
def leaky_relu_with_kink() -> Any:
    return LeakyReLU, [(normal(3, 4), 0.1), (torch.tensor([-1.0, 0.0, 2.0]), 0.1)]


@sound
def prelu_by_channel() -> Any:
    return PReLU, [(normal(2, 3, 4), torch.full((3,), 0.25))]


@sound
def hardtanh_on_its_bounds() -> Any:
    return HardTanh, [(normal(3, 4), -1.0, 1.0), (torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0]), -1.0, 1.0)]


@sound
def swiglu() -> Any:
    return Swiglu, [(normal(3, 4), normal(3, 4, seed=1))]


@sound
def exp_with_jvp() -> Any:
    return Exp, [(normal(3, 4),)]


@sound
def snake() -> Any:
    return Snake, [(normal(3, 4), torch.tensor(0.7))]
