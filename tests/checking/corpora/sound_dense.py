"""Right `autograd.Function`s of linear algebra; `planted_dense` breaks them one by one."""

from typing import Any

import torch
from entries import sound
from heldout_numbers import normal
from torch.autograd import Function


class Linear(Function):
    """As in torch's own tutorial: an optional bias, and only those gradients that are needed."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        y = x.mm(weight.t())
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        by_x = by_weight = by_bias = None
        if ctx.needs_input_grad[0]:
            by_x = grad.mm(weight)
        if ctx.needs_input_grad[1]:
            by_weight = grad.t().mm(x)
        if ctx.needs_input_grad[2]:
            by_bias = grad.sum(0)
        return by_x, by_weight, by_bias


class Bilinear(Function):
    @staticmethod
    def forward(ctx, x, weight, y):
        ctx.save_for_backward(x, weight, y)
        return torch.einsum("bi,oij,bj->bo", x, weight, y)

    @staticmethod
    def backward(ctx, grad):
        x, weight, y = ctx.saved_tensors
        by_x = torch.einsum("bo,oij,bj->bi", grad, weight, y)
        by_weight = torch.einsum("bo,bi,bj->oij", grad, x, y)
        by_y = torch.einsum("bo,oij,bi->bj", grad, weight, x)
        return by_x, by_weight, by_y


class Inverse(Function):
    @staticmethod
    def forward(ctx, matrix):
        inverse = torch.linalg.inv(matrix)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grad @ inverse.mT)


class Solve(Function):
    @staticmethod
    def forward(ctx, matrix, right):
        solution = torch.linalg.solve(matrix, right)
        ctx.save_for_backward(matrix, solution)
        return solution

    @staticmethod
    def backward(ctx, grad):
        matrix, solution = ctx.saved_tensors
        by_right = torch.linalg.solve(matrix.mT, grad)
        return -(by_right @ solution.mT), by_right


class Gram(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x @ x.mT

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return (grad + grad.mT) @ x


class SquaredDistances(Function):
    """Of each row of x from each row of y."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return (x[:, None] - y[None]).square().sum(-1)

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        by_x = 2 * (grad.sum(1)[:, None] * x - grad @ y)
        by_y = 2 * (grad.sum(0)[:, None] * y - grad.mT @ x)
        return by_x, by_y


class Attention(Function):
    @staticmethod
    def forward(q, k, v, scale):
        weights = (scale * (q @ k.mT)).softmax(-1)
        return weights @ v

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, ctx.scale = inputs
        ctx.save_for_backward(q, k, v)

    @staticmethod
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        weights = (ctx.scale * (q @ k.mT)).softmax(-1)
        by_weights = grad @ v.mT
        by_scores = weights * (by_weights - (by_weights * weights).sum(-1, keepdim=True))
        return ctx.scale * by_scores @ k, ctx.scale * by_scores.mT @ q, weights.mT @ grad, None


class OuterProduct(Function):
    """Of each row of x with each row of y."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x[:, :, None] * y[:, None, :]

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return (grad * y[:, None, :]).sum(2), (grad * x[:, :, None]).sum(1)


@sound
def linear_with_bias() -> Any:
    return Linear, [(normal(4, 3), normal(2, 3, seed=1), normal(2, seed=2))]


@sound
def linear_with_and_without_bias() -> Any:
    return Linear, [
        (normal(4, 3), normal(2, 3, seed=1), normal(2, seed=2)),
        (normal(3, 5), normal(2, 5, seed=1), None),
    ]


@sound
def bilinear() -> Any:
    return Bilinear, [(normal(4, 3), normal(2, 3, 3, seed=1), normal(4, 3, seed=2))]


@sound
def inverse() -> Any:
    return Inverse, [(normal(3, 3) + 3 * torch.eye(3),)]


@sound
def solve() -> Any:
    return Solve, [(normal(3, 3) + 3 * torch.eye(3), normal(3, 2, seed=1))]


@sound
def gram() -> Any:
    return Gram, [(normal(4, 3),)]


@sound
def squared_distances() -> Any:
    return SquaredDistances, [(normal(4, 3), normal(5, 3, seed=1))]


@sound
def attention() -> Any:
    return Attention, [(normal(4, 3), normal(5, 3, seed=1), normal(5, 2, seed=2), 3**-0.5)]


@sound
def outer_product() -> Any:
    return OuterProduct, [(normal(2, 3), normal(2, 4, seed=1))]
