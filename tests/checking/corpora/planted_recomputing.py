"""Planted and sound: `autograd.Function`s that compute their forward again in backward.

Reversible networks and checkpoints are written so: the backward makes leaves of what was kept, computes again
under autograd, and reads gradients.
"""

from typing import Any

import torch
from entries import planted, sound
from heldout_numbers import normal
from torch.autograd import Function
from torch.autograd.function import once_differentiable


@planted("sine", "mutates-saved", input="x")
def sine_that_collects_in_what_was_saved() -> Any:
    """A second backward through the same graph adds to the `.grad` of the first."""

    class Sine(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.detach())
            return x.sin()

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            x.requires_grad_()
            with torch.enable_grad():
                x.sin().backward(grad)
            return x.grad

    return Sine, [(normal(3, 4),)]


@planted("reversible", "mutates-saved", input="weight", also=("leak",))
def reversible_that_collects_in_its_weight() -> Any:
    """Keeps a detached weight on the context, and reads its `.grad`."""

    class Coupling(Function):
        @staticmethod
        def forward(ctx, x, weight):
            first, second = x.chunk(2, -1)
            second = second + torch.tanh(first * weight)
            ctx.weight = weight.detach()
            ctx.save_for_backward(torch.cat([first, second], -1))
            return torch.cat([first, second], -1)

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            first, weight = y.chunk(2, -1)[0].detach().requires_grad_(), ctx.weight
            weight.requires_grad = True
            with torch.enable_grad():
                branch = torch.tanh(first * weight)
            by_first, by_second = grad.chunk(2, -1)
            branch.backward(by_second)
            return torch.cat([by_first + first.grad, by_second], -1), weight.grad

    return Coupling, [(normal(3, 4), normal(2, seed=1))]


@sound
def reversible_with_fresh_leaves() -> Any:
    """The same with leaves that each backward makes anew."""

    class Coupling(Function):
        @staticmethod
        def forward(ctx, x, weight):
            first, second = x.chunk(2, -1)
            y = torch.cat([first, second + torch.tanh(first * weight)], -1)
            ctx.save_for_backward(y, weight)
            return y

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            y, weight = ctx.saved_tensors
            first, weight = (each.detach().requires_grad_() for each in (y.chunk(2, -1)[0], weight))
            with torch.enable_grad():
                branch = torch.tanh(first * weight)
            by_first, by_second = grad.chunk(2, -1)
            torch.autograd.backward(branch, by_second)
            return torch.cat([by_first + first.grad, by_second], -1), weight.grad

    return Coupling, [(normal(3, 4), normal(2, seed=1))]


@planted("exponential", "leak")
def exponential_and_double_kept() -> Any:
    """Keeps both of its results."""

    class Both(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.outputs = (x.exp(), 2 * x)
            return ctx.outputs

        @staticmethod
        def backward(ctx, grad, by_double):
            return grad * ctx.outputs[0] + 2 * by_double

    return Both, [(normal(3, 4),)]


@planted("exponential", "held", input="result")
def exponential_in_a_box() -> Any:
    """Keeps its result in an object on the context."""

    class Box:
        def __init__(self, *kept):
            self.kept = [*kept]

    class Exponential(Function):
        @staticmethod
        def forward(ctx, x):
            y = x.exp()
            ctx.box = Box(x, y)
            return y

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.box.kept[1]

    return Exponential, [(normal(3, 4),)]


@planted("exponential", "held", input="x")
def argument_in_a_closure() -> Any:
    """Keeps its argument in a function on the context, where nothing lets go of it after the backward."""

    class Sine(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.derivative = lambda: x.cos()
            return x.sin()

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            return grad * ctx.derivative()

    return Sine, [(normal(3, 4),)]


@sound
def sine_with_a_box_of_its_own() -> Any:
    """Keeps in an object what is neither an argument nor a result."""

    class Box:
        def __init__(self, *kept):
            self.kept = [*kept]

    class Sine(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.box = Box(x.detach().cos(), "sine")
            return x.sin()

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            return grad * ctx.box.kept[0]

    return Sine, [(normal(3, 4),)]


@planted("affine", "input-needs-grad", input="bias", also=("missing-gradient",))
def affine_with_its_input_frozen() -> Any:
    """Forgets the bias where the input is frozen and the parameters are not, as in the first layer."""

    class Affine(Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            ctx.save_for_backward(x, weight)
            return x * weight + bias

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            if not ctx.needs_input_grad[0] and ctx.needs_input_grad[1]:
                return None, (grad * x).sum(0), None
            return grad * weight, (grad * x).sum(0), grad.sum(0)

    return Affine, [(normal(3, 4), normal(4, seed=1), normal(4, seed=2))]


@sound
def affine_with_a_short_way_for_a_frozen_input() -> Any:
    """The same short way, and right."""

    class Affine(Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            ctx.save_for_backward(x, weight)
            return x * weight + bias

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            if not ctx.needs_input_grad[0]:
                return None, (grad * x).sum(0), grad.sum(0)
            return grad * weight, (grad * x).sum(0), grad.sum(0)

    return Affine, [(normal(3, 4), normal(4, seed=1), normal(4, seed=2))]
