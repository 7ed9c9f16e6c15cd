"""Held out: `autograd.Function`s that are wrong in what they keep and leave behind, or now and then."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from entries import planted
from heldout_numbers import normal, uniform
from torch import Tensor
from torch.autograd import Function


@planted("triplet_loss", "sign", input="negative")
def h_triplet_that_pulls_the_negative() -> Any:
    class Triplet(Function):
        @staticmethod
        def forward(ctx, anchor, positive, negative):
            ctx.save_for_backward(anchor, positive, negative)
            return (anchor - positive).square().sum(-1) - (anchor - negative).square().sum(-1)

        @staticmethod
        def backward(ctx, grad):
            anchor, positive, negative = ctx.saved_tensors
            double = 2 * grad[..., None]
            return (
                double * (negative - positive),
                double * (positive - anchor),
                double * (negative - anchor),
            )

    return Triplet, [(normal(3, 4), normal(3, 4, seed=1), normal(3, 4, seed=2))]


@planted("binarise", "input-needs-grad", input="x")
def h_soft_only_where_it_is_trained() -> Any:
    """The result itself is another one where the input needs a gradient."""

    class SoftStep(Function):
        @staticmethod
        def forward(ctx, x, sharpness):
            ctx.sharpness = sharpness
            soft = (sharpness * x).sigmoid()
            ctx.save_for_backward(x)
            return soft if ctx.needs_input_grad[0] else (x > 0).to(x.dtype)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            soft = (ctx.sharpness * x).sigmoid()
            return grad * ctx.sharpness * soft * (1 - soft), None

    return SoftStep, [(normal(3, 4), 4.0)]


@planted("arc_tangent", "second-order", input="x", order=2, also=("missing-term",))
def h_arc_tangent_with_a_second_function() -> Any:
    """The backward is a Function as well, whose own backward forgets that the slope depends on x."""

    class Slope(Function):
        @staticmethod
        def forward(ctx, grad, x):
            ctx.save_for_backward(x)
            return grad / (1 + x * x)

        @staticmethod
        def backward(ctx, grad_out):
            (x,) = ctx.saved_tensors
            return grad_out / (1 + x * x), torch.zeros_like(x)

    class ArcTangent(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.atan()

        @staticmethod
        def backward(ctx, grad):
            return Slope.apply(grad, ctx.saved_tensors[0])

    return ArcTangent, [(normal(3, 4),)]


@planted("embedding_norm", "leak")
def h_norm_that_remembers_all() -> Any:
    """Each call's input is appended to a list "for the statistics", and stays there."""
    seen: list[Tensor] = []

    class Norm(Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(x)
            ctx.save_for_backward(x)
            return (x.square().sum(-1) + 1.0).sqrt()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return x * (grad / (x.square().sum(-1) + 1.0).sqrt())[..., None]

    return Norm, [(normal(3, 4),)]


@planted("softplus", "nan", input="x", also=("region",))
def h_softplus_that_overflows() -> Any:
    """The forward is stable; exp(x) / (1 + exp(x)) of the backward is inf / inf where x is large."""

    class Softplus(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return F.softplus(x)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * x.exp() / (1 + x.exp())

    return Softplus, [(normal(3, 4),), (torch.tensor([-2.0, 0.5, 90.0]),)]


@planted("gaussian", "precision", input="x")
def h_gaussian_with_a_constant_in_float32() -> Any:
    """1 / sqrt(2 pi) stands in a tensor of float32: in float64 the gradient has seven digits."""

    class Gaussian(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            norm = torch.tensor(1 / math.sqrt(2 * math.pi), dtype=torch.float32)
            return -grad * x * torch.exp(-0.5 * x * x) * norm

    return Gaussian, [(normal(3, 4, dtype=torch.float64),)]


@planted("hyperbola", "forward-mode", input="x", also=("sign",))
def h_reciprocal_with_a_rising_tangent() -> Any:
    """The backward is right; the class's own `jvp` lacks the minus."""

    class Reciprocal(Function):
        @staticmethod
        def forward(x):
            return 1 / x

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(output)
            ctx.save_for_forward(output)

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            return -grad * y * y

        @staticmethod
        def jvp(ctx, tangent):
            (y,) = ctx.saved_tensors
            return tangent * y * y

    return Reciprocal, [(uniform(3, 4, low=0.5, high=2.0),)]


@planted("noise_floor", "aliases-input", input="x")
def h_gate_that_is_open() -> Any:
    """If nothing is to be done, the result is a view of the input."""

    class Gate(Function):
        @staticmethod
        def forward(ctx, x, threshold):
            ctx.save_for_backward(x)
            ctx.threshold = threshold
            if threshold <= 0:
                return x.detach()
            return x * (x.abs() > threshold)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * (x.abs() > ctx.threshold) if ctx.threshold > 0 else grad.clone(), None

    return Gate, [(normal(3, 4), 0.5), (normal(5, seed=1), 0.0)]


@planted("space_to_depth", "layout", input="x", also=("raises",))
def h_space_to_depth_by_view() -> Any:
    """The grad_output is viewed, which one that is transposed or expanded does not allow."""

    class SpaceToDepth(Function):
        @staticmethod
        def forward(ctx, x):
            if x.shape[-1] % 2:
                raise ValueError(f"SpaceToDepth: the width must be even, got {x.shape[-1]}")
            return x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).transpose(-1, -2).contiguous()

        @staticmethod
        def backward(ctx, grad):
            n = grad.shape[-1]
            halves = grad.view(*grad.shape[:-2], 2 * n)
            return torch.stack([halves[..., :n], halves[..., n:]], -1).reshape(*grad.shape[:-2], 2 * n)

    return SpaceToDepth, [(normal(3, 4),), (normal(2, 6, seed=1),)]


@planted("block_scale", "region", input="x", also=("missing-gradient", "missing-term"))
def h_backward_in_whole_blocks() -> Any:
    """A grid of n // 4 blocks: what is left over gets no gradient, and both samples leave nothing."""

    class Cube(Function):
        @staticmethod
        def forward(ctx, x):
            if x.dim() == 0:
                raise ValueError("Cube: x must have a dimension")
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            found = torch.zeros_like(x)
            for block in range(x.shape[-1] // 4):
                at = slice(4 * block, 4 * block + 4)
                found[..., at] = 3 * grad[..., at] * x[..., at] ** 2
            return found

    return Cube, [(normal(3, 4),), (normal(8, seed=1),)]
