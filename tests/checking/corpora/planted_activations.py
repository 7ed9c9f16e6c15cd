"""Planted: `autograd.Function`s of single numbers whose gradients are wrong."""

import math
from typing import Any

import sound_activations as right
import torch
from entries import planted
from heldout_numbers import normal
from torch.autograd import Function


@planted("swish", "missing-term", input="x")
def swish_without_product_rule() -> Any:
    class Swish(right.Swish):
        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * torch.sigmoid(x)

    return Swish, [(normal(3, 4),)]


@planted("swish", "second-order", input="x", order=2)
def swish_keeps_sigmoid_on_ctx() -> Any:
    """Autograd does not know that what is kept on ctx came from x."""

    class Swish(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.sigmoid = torch.sigmoid(x)
            ctx.save_for_backward(x)
            return x * ctx.sigmoid

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            s = ctx.sigmoid
            return grad * (s * (1 + x * (1 - s)))

    return Swish, [(normal(3, 4),)]


@planted("mish", "missing-term", input="x")
def mish_without_inner_derivative() -> Any:
    class Mish(right.Mish):
        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * torch.tanh(torch.nn.functional.softplus(x))

    return Mish, [(normal(3, 4),)]


@planted("gelu", "unknown", input="x")
def gelu_of_the_other_gelu() -> Any:
    """Exact forward, and the gradient of the approximation x sigmoid(1.702 x)."""

    class Gelu(right.Gelu):
        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            s = torch.sigmoid(1.702 * x)
            return grad * (s + 1.702 * x * s * (1 - s))

    return Gelu, [(normal(3, 4),), (normal(5, seed=1),)]


@planted("leaky_relu", "region", input="x")
def leaky_relu_backward_of_relu() -> Any:
    class LeakyReLU(right.LeakyReLU):
        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * (x > 0), None

    return LeakyReLU, [(normal(3, 4), 0.1)]


@planted("leaky_relu", "mutates-grad-output")
def leaky_relu_in_place_on_grad() -> Any:
    class LeakyReLU(right.LeakyReLU):
        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            grad_input = grad
            grad_input[x <= 0] *= ctx.slope
            return grad_input, None

    return LeakyReLU, [(normal(3, 4), 0.1)]


@planted("prelu", "unreduced-broadcast", input="slope")
def prelu_left_to_the_engine() -> Any:
    """Autograd sums leading dimensions, and so the first two: the slope belongs to dimension 1."""

    class PReLU(right.PReLU):
        @staticmethod
        def backward(ctx, grad):
            x, slope = ctx.saved_tensors
            by_x = torch.where(x > 0, grad, slope[:, None] * grad)
            return by_x, grad * x.clamp(max=0)

    return PReLU, [(normal(2, 4, 4), torch.full((4,), 0.25))]


@planted("hardtanh", "region", input="x")
def hardtanh_open_above() -> Any:
    class HardTanh(right.HardTanh):
        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * (x > ctx.low), None, None

    return HardTanh, [(normal(3, 4), -1.0, 1.0)]


@planted("exp", "region", input="x")
def exp_with_truncated_gradient() -> Any:
    """As radiance fields are trained: the backward stops growing, and nothing says so."""

    class TruncExp(right.Exp):
        jvp = Function.jvp

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * x.clamp(max=11).exp()

    return TruncExp, [(normal(3, 4),)]


@planted("swiglu", "swapped-inputs")
def swiglu_swapped() -> Any:
    class Swiglu(right.Swiglu):
        @staticmethod
        def backward(ctx, grad):
            by_x, by_gate = right.Swiglu.backward(ctx, grad)
            return by_gate, by_x

    return Swiglu, [(normal(3, 4), normal(3, 4, seed=1))]


@planted("swiglu", "region", input="gate")
def swiglu_in_whole_blocks() -> Any:
    """A kernel's loop over blocks of four columns; with the sizes of the samples nothing is left over."""

    class Swiglu(right.Swiglu):
        @staticmethod
        def backward(ctx, grad):
            by_x, by_gate = right.Swiglu.backward(ctx, grad)
            done = torch.zeros_like(by_gate)
            whole = by_gate.shape[-1] // 4 * 4
            done[..., :whole] = by_gate[..., :whole]
            return by_x, done

    return Swiglu, [(normal(3, 4), normal(3, 4, seed=1)), (normal(2, 8), normal(2, 8, seed=1))]


@planted("relu", "nonlinear-grad", input="x")
def relu_guided() -> Any:
    """J. T. Springenberg et al., 2014: a visualisation, left in the training code."""

    class GuidedReLU(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clamp(min=0)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * (x > 0) * (grad > 0)

    return GuidedReLU, [(normal(3, 4),)]


@planted("snake", "missing-gradient", input="a")
def snake_with_frozen_frequency() -> Any:
    class Snake(right.Snake):
        @staticmethod
        def backward(ctx, grad):
            return right.Snake.backward(ctx, grad)[0], None

    return Snake, [(normal(3, 4), torch.tensor(0.7))]


@planted("snake", "missing-term", input="a")
def snake_forgets_its_divisor() -> Any:
    """a stands inside of the sine and below it; the second is forgotten."""

    class Snake(right.Snake):
        @staticmethod
        def backward(ctx, grad):
            x, a = ctx.saved_tensors
            wave = torch.sin(2 * a * x)
            return grad * (1 + wave), (grad * x * wave / a).sum()

    return Snake, [(normal(3, 4), torch.tensor(0.7))]


@planted("exp", "forward-mode", input="x", also=("scale",))
def exp2_with_the_tangent_of_exp() -> Any:
    class Exp2(Function):
        @staticmethod
        def forward(x):
            return torch.exp2(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(output)
            ctx.save_for_forward(output)

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            return grad * y * math.log(2)

        @staticmethod
        def jvp(ctx, tangent):
            (y,) = ctx.saved_tensors
            return tangent * y

    return Exp2, [(normal(3, 4),)]


@planted("exp", "scale", input="x")
def exp2_without_logarithm() -> Any:
    class Exp2(Function):
        @staticmethod
        def forward(ctx, x):
            y = torch.exp2(x)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            return grad * y

    return Exp2, [(normal(3, 4),)]
