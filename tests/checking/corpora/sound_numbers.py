"""Right `autograd.Function`s whose numbers are hard: kinks, complex, tiny, huge, or badly conditioned."""

import math
from typing import Any

import torch
from entries import sound
from heldout_numbers import normal, uniform
from torch.autograd import Function

import opsmith


@sound
def magnitude_on_its_kink() -> Any:
    """Zero has slope zero here, as in torch."""

    class Magnitude(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.abs()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * x.sign()

    return Magnitude, [(torch.tensor([-1.5, 0.0, 0.0, 2.0]),)]


@sound
def relu_that_is_one_at_zero() -> Any:
    """Of the slopes at zero it takes the right one, where torch takes the left: both are derivatives."""

    class ReLU(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clamp(min=0)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * (x >= 0)

    return ReLU, [(torch.tensor([[-1.0, 0.0, 0.5], [0.0, 2.0, -0.1]]),)]


@sound
def maximum_with_ties() -> Any:
    """Equal elements share the gradient."""

    class Maximum(Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return torch.maximum(x, y)

        @staticmethod
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            by_x = torch.where(x == y, grad / 2, torch.where(x > y, grad, torch.zeros_like(grad)))
            return by_x, grad - by_x

    return Maximum, [(torch.tensor([1.0, 2.0, -1.0, 0.0]), torch.tensor([1.0, 0.5, -1.0, 3.0]))]


@sound
def complex_product() -> Any:
    class ComplexProduct(Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            return grad * y.conj(), grad * x.conj()

    return ComplexProduct, [
        (torch.complex(normal(3), normal(3, seed=1)), torch.complex(normal(3, seed=2), normal(3, seed=3)))
    ]


@sound
def power_of_a_complex_signal() -> Any:
    """Complex in, real out: no holomorphic function, and its gradient is twice the signal."""

    class Power(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.real.square() + x.imag.square()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 2 * grad * x

    return Power, [(torch.complex(normal(2, 3), normal(2, 3, seed=1)),)]


@sound
def phase_from_a_real_angle() -> Any:
    """Real in, complex out."""

    class Phase(Function):
        @staticmethod
        def forward(ctx, angle):
            y = torch.complex(angle.cos(), angle.sin())
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            return grad.imag * y.real - grad.real * y.imag

    return Phase, [(normal(3, 4),)]


@sound
def tiny_gradients() -> Any:
    """In other units: slopes of 1e-12."""

    class Faint(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return 1e-12 * x.sin()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 1e-12 * grad * x.cos()

    return Faint, [(normal(3, 4),)]


@sound
def huge_gradients() -> Any:
    class Steep(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return 1e12 * x.tanh()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 1e12 * grad * (1 - x.tanh().square())

    return Steep, [(normal(3, 4),)]


@sound
def tiny_beside_huge() -> Any:
    """Two inputs whose gradients are 18 orders of magnitude apart."""

    class Mixture(Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return 1e-9 * x.exp() + 1e9 * y.square()

        @staticmethod
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            return 1e-9 * grad * x.exp(), 2e9 * grad * y

    return Mixture, [(normal(3, 4), normal(3, 4, seed=1))]


@sound
def solve_of_a_nearly_singular_matrix() -> Any:
    """A condition of 1e6: six digits fewer than the dtype has, from every method."""

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

    matrix = torch.ones(3, 3, dtype=torch.float64) + 1e-6 * normal(3, 3, dtype=torch.float64)
    return Solve, [(matrix, normal(3, 2, seed=1, dtype=torch.float64))]


@sound
def difference_that_cancels() -> Any:
    """1 - cos x near zero: the forward loses digits, as its author wrote it, and the gradient does not."""

    class Versine(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return 1 - x.cos()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * x.sin()

    return Versine, [(1e-3 * normal(3, 4),)]


@sound
def variance_of_numbers_far_from_zero() -> Any:
    """Around a thousand: stable, by the mean first."""

    class Variance(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return (x - x.mean(-1, keepdim=True)).square().mean(-1)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 2 * grad[..., None] * (x - x.mean(-1, keepdim=True)) / x.shape[-1]

    return Variance, [(1000 + normal(3, 8),)]


@sound
def square_root_down_to_zero() -> Any:
    """Slopes of up to 1e4, and a domain that ends where the samples begin."""

    class SquareRoot(Function):
        @staticmethod
        def forward(ctx, x):
            y = x.sqrt()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            return grad / (2 * y)

    return SquareRoot, [(torch.tensor([1e-8, 1e-4, 0.3, 2.0], dtype=torch.float64),)]


@sound
def float32_inside_and_said_so() -> Any:
    """A codebook in float32 for every dtype, declared as such."""

    class Companding(Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor, mu: float) -> torch.Tensor:
            wide = x.float()
            ctx.save_for_backward(x)
            ctx.mu = mu
            return (wide.sign() * torch.log1p(mu * wide.abs()) / math.log1p(mu)).to(x.dtype)

        @staticmethod
        def backward(ctx, grad: torch.Tensor) -> Any:
            (x,) = ctx.saved_tensors
            wide = x.float()
            slope = ctx.mu / ((1 + ctx.mu * wide.abs()) * math.log1p(ctx.mu))
            return (grad.float() * slope).to(x.dtype), None

    operator = opsmith.adopt(
        Companding, "corpus::companding", kind="float32", samples=lambda: [(uniform(3, 4), 255.0)]
    )
    return operator, None


@sound
def loss_that_is_nearly_converged() -> Any:
    """The gradient is the small difference of two large sums."""

    class Residual(Function):
        @staticmethod
        def forward(ctx, prediction, target):
            ctx.save_for_backward(prediction, target)
            return (prediction - target).square().sum(-1)

        @staticmethod
        def backward(ctx, grad):
            prediction, target = ctx.saved_tensors
            slope = 2 * grad[..., None] * (prediction - target)
            return slope, -slope

    target = 100 + normal(3, 4)
    return Residual, [(target + 1e-2 * normal(3, 4, seed=1), target)]


@sound
def step_without_slope() -> Any:
    """A staircase: its derivative is zero, and that is what it returns."""

    class Floor(Function):
        @staticmethod
        def forward(ctx, x):
            return x.floor()

        @staticmethod
        def backward(ctx, grad):
            return torch.zeros_like(grad)

    return Floor, [(3 * normal(3, 4),)]
