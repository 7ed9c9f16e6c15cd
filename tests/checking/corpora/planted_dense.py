"""Planted: `autograd.Function`s of linear algebra whose gradients are wrong."""

from typing import Any

import sound_dense as right
import torch
from entries import planted
from heldout_numbers import normal
from torch.autograd import Function


@planted("linear", "transposed", input="weight")
def linear_transposed() -> Any:
    """Nothing tells as long as the layer is square."""

    class Linear(right.Linear):
        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad.mm(weight), x.t().mm(grad), grad.sum(0)

    return Linear, [(normal(4, 3), normal(3, 3, seed=1), normal(3, seed=2))]


@planted("linear", "missing-gradient", input="bias")
def linear_forgets_bias() -> Any:
    class Linear(right.Linear):
        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad.mm(weight), grad.t().mm(x), None

    return Linear, [(normal(4, 3), normal(2, 3, seed=1), normal(2, seed=2))]


@planted("linear", "scale", input="bias")
def linear_bias_by_mean() -> Any:
    class Linear(right.Linear):
        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad.mm(weight), grad.t().mm(x), grad.mean(0)

    return Linear, [(normal(4, 3), normal(2, 3, seed=1), normal(2, seed=2))]


@planted("linear", "input-needs-grad", input="bias")
def linear_bias_hangs_on_weight() -> Any:
    """The bias is looked at where the weight is: a frozen weight freezes the bias."""

    class Linear(right.Linear):
        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            by_x = by_weight = by_bias = None
            if ctx.needs_input_grad[0]:
                by_x = grad.mm(weight)
            if ctx.needs_input_grad[1]:
                by_weight = grad.t().mm(x)
                by_bias = grad.sum(0)
            return by_x, by_weight, by_bias

    return Linear, [(normal(4, 3), normal(2, 3, seed=1), normal(2, seed=2))]


@planted("linear", "input-needs-grad", input="x", also=("raises",))
def linear_saves_what_x_needs() -> Any:
    """The weight is kept for the weight's gradient, and x for that of x: the wrong way round."""

    class Linear(Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(
                x if ctx.needs_input_grad[0] else None, weight if ctx.needs_input_grad[1] else None
            )
            return x @ weight.mT

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            by_x = grad @ weight if ctx.needs_input_grad[0] else None
            by_weight = grad.mT @ x if ctx.needs_input_grad[1] else None
            return by_x, by_weight

    return Linear, [(normal(4, 3), normal(2, 3, seed=1))]


@planted("linear", "raises", input="bias")
def linear_without_bias_raises() -> Any:
    """A path that nobody has run: without a bias there is nothing to multiply."""

    class Linear(Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            ctx.save_for_backward(x, weight, bias)
            y = x @ weight.mT
            return y if bias is None else y + bias.exp()

        @staticmethod
        def backward(ctx, grad):
            x, weight, bias = ctx.saved_tensors
            return grad @ weight, grad.mT @ x, grad.sum(0) * bias.exp()

    return Linear, [
        (normal(4, 3), normal(2, 3, seed=1), normal(2, seed=2)),
        (normal(4, 3), normal(2, 3, seed=1), None),
    ]


@planted("bilinear", "swapped-inputs")
def bilinear_swapped() -> Any:
    class Bilinear(right.Bilinear):
        @staticmethod
        def backward(ctx, grad):
            by_x, by_weight, by_y = right.Bilinear.backward(ctx, grad)
            return by_y, by_weight, by_x

    return Bilinear, [(normal(4, 3), normal(2, 3, 3, seed=1), normal(4, 3, seed=2))]


@planted("bilinear", "transposed", input="weight", also=("swapped-inputs",))
def bilinear_transposed() -> Any:
    class Bilinear(right.Bilinear):
        @staticmethod
        def backward(ctx, grad):
            x, weight, y = ctx.saved_tensors
            by_x = torch.einsum("bo,oij,bj->bi", grad, weight, y)
            by_weight = torch.einsum("bo,bi,bj->oji", grad, x, y)
            by_y = torch.einsum("bo,oij,bi->bj", grad, weight, x)
            return by_x, by_weight, by_y

    return Bilinear, [(normal(4, 3), normal(2, 3, 3, seed=1), normal(4, 3, seed=2))]


@planted("inverse", "sign", input="matrix")
def inverse_without_minus() -> Any:
    class Inverse(right.Inverse):
        @staticmethod
        def backward(ctx, grad):
            (inverse,) = ctx.saved_tensors
            return inverse.mT @ grad @ inverse.mT

    return Inverse, [(normal(3, 3) + 3 * torch.eye(3),)]


@planted("solve", "unknown", input="right", also=("transposed",))
def solve_with_the_matrix_itself() -> Any:
    """The transpose is inside of the formula, where no rearranging of the result fixes it."""

    class Solve(right.Solve):
        @staticmethod
        def backward(ctx, grad):
            matrix, solution = ctx.saved_tensors
            by_right = torch.linalg.solve(matrix.mT, grad)
            return -(by_right @ solution.mT), torch.linalg.solve(matrix, grad)

    return Solve, [(normal(3, 3) + 3 * torch.eye(3), normal(3, 2, seed=1))]


@planted("gram", "missing-term", input="x")
def gram_from_one_side() -> Any:
    class Gram(right.Gram):
        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad @ x

    return Gram, [(normal(4, 3),)]


@planted("cdist", "scale", input="y")
def distances_without_two() -> Any:
    class SquaredDistances(right.SquaredDistances):
        @staticmethod
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            by_x = 2 * (grad.sum(1)[:, None] * x - grad @ y)
            return by_x, grad.sum(0)[:, None] * y - grad.mT @ x

    return SquaredDistances, [(normal(4, 3), normal(5, 3, seed=1))]


@planted("cdist", "missing-gradient", input="y")
def distances_from_constant_centres() -> Any:
    class SquaredDistances(right.SquaredDistances):
        @staticmethod
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            return 2 * (grad.sum(1)[:, None] * x - grad @ y), torch.zeros_like(y)

    return SquaredDistances, [(normal(4, 3), normal(5, 3, seed=1))]


@planted("attention", "scale", input="q")
def attention_scaled_once() -> Any:
    """The scale is applied to the gradient of k and forgotten in that of q."""

    class Attention(right.Attention):
        @staticmethod
        def backward(ctx, grad):
            q, k, v = ctx.saved_tensors
            weights = (ctx.scale * (q @ k.mT)).softmax(-1)
            by_weights = grad @ v.mT
            by_scores = weights * (by_weights - (by_weights * weights).sum(-1, keepdim=True))
            return by_scores @ k, ctx.scale * by_scores.mT @ q, weights.mT @ grad, None

    return Attention, [(normal(4, 3), normal(5, 3, seed=1), normal(5, 2, seed=2), 3**-0.5)]


@planted("attention", "gradient-count")
def attention_without_none() -> Any:
    class Attention(right.Attention):
        @staticmethod
        def backward(ctx, grad):
            return right.Attention.backward(ctx, grad)[:3]

    return Attention, [(normal(4, 3), normal(5, 3, seed=1), normal(5, 2, seed=2), 3**-0.5)]


@planted("outer_product", "unreduced-broadcast", input="y", also=("missing-term",))
def outer_product_of_first_row() -> Any:
    """The dimension over which y was repeated should be summed; its first element is taken."""

    class OuterProduct(right.OuterProduct):
        @staticmethod
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            return (grad * y[:, None, :]).sum(2), (grad * x[:, :, None])[:, 0]

    return OuterProduct, [(normal(2, 3), normal(2, 4, seed=1))]
