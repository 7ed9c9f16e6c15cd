"""Functions of a small research project, gathered over the years."""

import numpy as np
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Mish(Function):
    """x * tanh(softplus(x)); saves its input alone."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.tanh(torch.nn.functional.softplus(x))

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        inner = torch.tanh(torch.nn.functional.softplus(x))
        return grad_output * (inner + x * torch.sigmoid(x) * (1 - inner * inner))


class Affine(Function):
    """x @ weight.T + bias."""

    @staticmethod
    def forward(x, weight, bias):
        return x @ weight.T + bias

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, _ = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        return grad_output @ weight, grad_output.T @ x, grad_output.sum(0)


class ApplyActivation(Function):
    """Any activation with its derivative."""

    @staticmethod
    def forward(ctx, x, activation, derivative):
        ctx.save_for_backward(x)
        ctx.derivative = derivative
        return activation(x)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * ctx.derivative(x), None, None


class AverageOfMany(Function):
    """The mean of any number of tensors."""

    @staticmethod
    def forward(ctx, *tensors):
        ctx.count = len(tensors)
        return sum(tensors) / len(tensors)

    @staticmethod
    def backward(ctx, grad_output):
        return tuple(grad_output / ctx.count for _ in range(ctx.count))


class Square(Function):
    """x squared."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * x


class ScaleRows(Function):
    """Multiplies each row of a matrix by its own factor."""

    @staticmethod
    def forward(ctx, x, factors):
        ctx.save_for_backward(x, factors)
        return x * factors[:, None]

    @staticmethod
    def backward(ctx, grad_output):
        x, factors = ctx.saved_tensors
        rows, columns = grad_output.shape
        # One flat pass over the gradient, as the CUDA version did.
        grad_output = grad_output.as_strided((rows, columns), (columns, 1))
        return grad_output * factors[:, None], (grad_output * x).sum(1)


class LeakyReLUInPlace(Function):
    """Leaky ReLU that overwrites its input to save memory."""

    @staticmethod
    def forward(ctx, x, negative_slope=0.01):
        ctx.negative_slope = negative_slope
        ctx.save_for_backward(x > 0)
        x.mul_(torch.where(x > 0, 1.0, negative_slope))
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad_output):
        (positive,) = ctx.saved_tensors
        return torch.where(positive, grad_output, ctx.negative_slope * grad_output), None


class Arctangent(Function):
    """arctan, computed by NumPy."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(np.arctan(x.detach().numpy()))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return torch.from_numpy(grad_output.numpy() / (1 + x.detach().numpy() ** 2))


class DropFeatures(Function):
    """Drops each element with probability p and scales the rest."""

    @staticmethod
    def forward(ctx, x, p=0.5):
        ctx.mask = (torch.rand_like(x) > p) / (1 - p)
        return x * ctx.mask

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output * ctx.mask, None


class Binarize(Function):
    """The sign of x, with the straight-through gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * (x.abs() <= 1)
