"""Planted: `autograd.Function`s that are right in first order, and in reverse mode, and wrong beyond."""

from typing import Any

import torch
import torch.nn.functional as F
from entries import planted
from heldout_numbers import normal, uniform
from sound_dense import Linear
from torch.autograd import Function


@planted("softplus", "second-order", input="x", order=2, also=("scale",))
def softplus_with_a_wrong_second_function() -> Any:
    """The backward is a Function, and its own backward counts the steepness once too little."""

    class Slope(Function):
        @staticmethod
        def forward(ctx, grad, x, beta):
            s = torch.sigmoid(beta * x)
            ctx.save_for_backward(grad, x)
            ctx.beta = beta
            return grad * s

        @staticmethod
        def backward(ctx, by_slope):
            grad, x = ctx.saved_tensors
            s = torch.sigmoid(ctx.beta * x)
            return by_slope * s, by_slope * grad * s * (1 - s), None

    class Softplus(Function):
        @staticmethod
        def forward(ctx, x, beta):
            ctx.save_for_backward(x)
            ctx.beta = beta
            return F.softplus(x, beta)

        @staticmethod
        def backward(ctx, grad):
            return Slope.apply(grad, ctx.saved_tensors[0], ctx.beta), None

    return Softplus, [(normal(3, 4), 2.0)]


@planted("cosine_similarity", "second-order", order=2)
def similarity_of_detached_norms() -> Any:
    """`.data` in the backward, "to save memory"."""

    class Cosine(Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))

        @staticmethod
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            nx, ny = x.data.norm(dim=-1, keepdim=True), y.data.norm(dim=-1, keepdim=True)
            cos = (x * y).sum(-1, keepdim=True) / (nx * ny)
            grad = grad[..., None]
            return grad * (y / (nx * ny) - cos * x / nx**2), grad * (x / (nx * ny) - cos * y / ny**2)

    return Cosine, [(normal(3, 4), normal(3, 4, seed=1))]


@planted("interpolation", "second-order", input="x", order=2)
def potential_with_a_force_without_graph() -> Any:
    """Forces are trained through the second order; here they are computed under `no_grad`."""

    class Morse(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return (1 - torch.exp(1 - x)).square()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            with torch.no_grad():
                e = torch.exp(1 - x)
                force = 2 * (1 - e) * e
            return grad * force

    return Morse, [(uniform(3, 4, low=0.5, high=2.5),)]


@planted("mul", "forward-mode", also=("missing-term", "missing-gradient"))
def product_with_half_a_tangent() -> Any:
    class Product(Function):
        @staticmethod
        def forward(x, y):
            return x * y

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            return grad * y, grad * x

        @staticmethod
        def jvp(ctx, tangent_x, tangent_y):
            _, y = ctx.saved_tensors
            return tangent_x * y

    return Product, [(normal(3, 4), normal(3, 4, seed=1))]


@planted("linear", "forward-mode", input="bias", also=("missing-term", "missing-gradient"))
def linear_whose_tangent_has_no_bias() -> Any:
    class WithTangent(Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            ctx.save_for_forward(x, weight)
            return Linear.forward(ctx, x, weight, bias)

        backward = Linear.backward

        @staticmethod
        def jvp(ctx, tangent_x, tangent_weight, _):
            x, weight = ctx.saved_tensors
            return tangent_x @ weight.mT + x @ tangent_weight.mT

    return WithTangent, [(normal(4, 3), normal(2, 3, seed=1), normal(2, seed=2))]


@planted("softmax", "kernel-mismatch", input="x", also=("shape",))
def softmax_batched_along_its_own_rows() -> Any:
    """The rule for vmap takes the batch to come first, wherever it is."""

    class ColumnSoftmax(Function):
        @staticmethod
        def forward(x):
            return x.softmax(0)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(output)

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            return y * (grad - (grad * y).sum(0, keepdim=True))

        @staticmethod
        def vmap(info, in_dims, x):
            return torch.softmax(x, 1), 0

    return ColumnSoftmax, [(normal(4, 4),)]


@planted("polar", "missing-gradient", input="x", also=("missing-term",))
def polar_that_forgets_its_angle() -> Any:
    """Two results, and the gradient of the second is not looked at."""

    class Polar(Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return torch.hypot(x, y), torch.atan2(y, x)

        @staticmethod
        def backward(ctx, by_radius, by_angle):
            x, y = ctx.saved_tensors
            radius = torch.hypot(x, y)
            by_x = by_radius * x / radius
            return by_x, by_radius * y / radius + by_angle * x / radius.square()

    return Polar, [(normal(3, 4), normal(3, 4, seed=1))]


@planted("polar", "raises")
def polar_that_meets_none() -> Any:
    """`set_materialize_grads(False)`, and no thought of what that means where one result is not used."""

    class Polar(Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(x, y)
            return torch.hypot(x, y), torch.atan2(y, x)

        @staticmethod
        def backward(ctx, by_radius, by_angle):
            x, y = ctx.saved_tensors
            radius = torch.hypot(x, y)
            by_x = by_radius * x / radius - by_angle * y / radius.square()
            return by_x, by_radius * y / radius + by_angle * x / radius.square()

    return Polar, [(normal(3, 4), normal(3, 4, seed=1))]


@planted("complex_mul", "sign")
def complex_product_not_conjugated() -> Any:
    """Of holomorphic functions, torch's gradient takes the conjugate of the derivative."""

    class ComplexProduct(Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            return grad * y, grad * x

    return ComplexProduct, [
        (torch.complex(normal(3), normal(3, seed=1)), torch.complex(normal(3, seed=2), normal(3, seed=3)))
    ]


@planted("mul", "swapped-inputs")
def product_with_its_own_factors() -> Any:
    class Product(Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            return grad * x, grad * y

    return Product, [(normal(3, 4), normal(3, 4, seed=1))]


@planted("mul", "shape", input="y", also=("raises", "unreduced-broadcast"))
def product_without_keepdim() -> Any:
    """Summed over what was broadcast, and one dimension short."""

    class Product(Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            return grad * y, (grad * x).sum(1)

    return Product, [(normal(3, 4), normal(3, 1, seed=1))]


@planted("temperature", "unreduced-broadcast", input="t", also=("missing-term",))
def temperature_of_the_first_row() -> Any:
    """One number for all rows; the gradient of the first row stands for the sum."""

    class Sharpen(Function):
        @staticmethod
        def forward(ctx, x, t):
            ctx.save_for_backward(x, t)
            return x / t

        @staticmethod
        def backward(ctx, grad):
            x, t = ctx.saved_tensors
            return grad / t, -(grad * x / t.square())[0].sum()

    return Sharpen, [(normal(3, 4), torch.tensor(0.7))]


@planted("mul", "gradient-count")
def product_with_a_gradient_too_many() -> Any:
    class Product(Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            return grad * y, grad * x, grad

    return Product, [(normal(3, 4), normal(3, 4, seed=1))]
