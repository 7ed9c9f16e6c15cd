"""Held out: `autograd.Function`s that look suspicious and are right."""

from typing import Any

import numpy as np
import torch
from entries import sound
from heldout_numbers import normal, uniform, whole
from torch.autograd import Function
from torch.autograd.function import once_differentiable


@sound
def h_arsinh_by_numpy() -> Any:
    """NumPy on both ways, and `once_differentiable` says so."""

    class ArcSinh(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.as_tensor(np.arcsinh(x.detach().numpy()))

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad / torch.as_tensor(np.hypot(x.detach().numpy(), 1))

    return ArcSinh, [(normal(3, 4),)]


@sound
def h_embedding_with_padding() -> Any:
    """None for the indices; rows that repeat, and one that never counts."""

    class Embedding(Function):
        @staticmethod
        def forward(ctx, index, table, padding):
            ctx.save_for_backward(index)
            ctx.rows, ctx.padding = table.shape[0], padding
            rows = table.index_select(0, index.reshape(-1)).reshape(*index.shape, table.shape[-1])
            return rows * (index != padding)[..., None]

        @staticmethod
        def backward(ctx, grad):
            (index,) = ctx.saved_tensors
            kept = grad * (index != ctx.padding)[..., None]
            spread = grad.new_zeros(ctx.rows, grad.shape[-1])
            kept = kept.reshape(index.numel(), grad.shape[-1])
            return None, spread.index_add(0, index.reshape(-1), kept), None

    return Embedding, [(whole(2, 5, high=6), normal(6, 3), 0)]


@sound
def h_bias_left_to_the_engine() -> Any:
    """Gradients of broadcast shapes, which autograd sums."""

    class Affine(Function):
        @staticmethod
        def forward(ctx, x, scale, shift):
            ctx.save_for_backward(x, scale)
            return x * scale + shift

        @staticmethod
        def backward(ctx, grad):
            x, scale = ctx.saved_tensors
            return grad * scale, grad * x, grad

    return Affine, [(normal(4, 3), normal(3, seed=1), normal(1, seed=2))]


@sound
def h_sum_with_an_expanded_gradient() -> Any:
    class Total(Function):
        @staticmethod
        def forward(ctx, x):
            if x.dim() == 0:
                raise ValueError("Total: there is no row in a single number")
            ctx.shape = x.shape
            return x.sum(-1)

        @staticmethod
        def backward(ctx, grad):
            return grad[..., None].expand(ctx.shape)

    return Total, [(normal(3, 4),), (normal(2, 3, 5, seed=1),)]


@sound
def h_product_that_looks_what_is_needed() -> Any:
    """It saves and computes less where less is needed; what it computes stays the same."""

    class Product(Function):
        @staticmethod
        def forward(ctx, x, y):
            first, second = ctx.needs_input_grad
            ctx.save_for_backward(x if second else None, y if first or second else None)
            return x * y.sin()

        @staticmethod
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            by_x = grad * y.sin() if ctx.needs_input_grad[0] else None
            by_y = grad * x * y.cos() if ctx.needs_input_grad[1] else None
            return by_x, by_y

    return Product, [(normal(3, 4), normal(3, 4, seed=1))]


@sound
def h_softmax_from_its_result() -> Any:
    """It saves a result, which autograd follows in a second order."""

    class Softmax(Function):
        @staticmethod
        def forward(ctx, x):
            p = x.softmax(-1)
            ctx.save_for_backward(p)
            return p

        @staticmethod
        def backward(ctx, grad):
            (p,) = ctx.saved_tensors
            return p * (grad - (grad * p).sum(-1, keepdim=True))

    return Softmax, [(normal(3, 4),), (normal(5, seed=1),)]


@sound
def h_standardise_with_its_deviation() -> Any:
    """The deviation is saved; since it is a second result, its own gradient is handed back as well."""

    class Standardise(Function):
        @staticmethod
        def forward(ctx, x):
            if x.dim() == 0:
                raise ValueError("Standardise: there is no row in a single number")
            deviation = (x.square().mean(-1, keepdim=True) + 0.1).sqrt()
            ctx.save_for_backward(x, deviation)
            return x / deviation, deviation

        @staticmethod
        def backward(ctx, grad, by_deviation):
            x, deviation = ctx.saved_tensors
            total = by_deviation - (grad * x).sum(-1, keepdim=True) / deviation.square()
            return grad / deviation + total * x / (deviation * x.shape[-1])

    return Standardise, [(normal(3, 4),)]


@sound
def h_top_two_and_where() -> Any:
    """A result that is marked as having no gradient; an order that ties decide."""

    class TopTwo(Function):
        @staticmethod
        def forward(ctx, x):
            if x.shape[-1] < 2:
                raise ValueError(f"TopTwo: a row must have two elements, got {x.shape[-1]}")
            value, place = x.topk(2, -1)
            ctx.shape = x.shape
            ctx.save_for_backward(place)
            ctx.mark_non_differentiable(place)
            return value, place

        @staticmethod
        def backward(ctx, grad, _):
            (place,) = ctx.saved_tensors
            return grad.new_zeros(ctx.shape).scatter(-1, place, grad)

    return TopTwo, [(normal(3, 5),)]


@sound
def h_polar_without_zeros() -> Any:
    """`set_materialize_grads(False)`, and each gradient may be missing."""

    class Polar(Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(x, y)
            return torch.hypot(x, y), torch.atan2(y, x)

        @staticmethod
        def backward(ctx, by_radius, by_angle):
            x, y = ctx.saved_tensors
            square = x * x + y * y
            found = [(x / square.sqrt(), y / square.sqrt(), by_radius), (-y / square, x / square, by_angle)]
            parts = [(a * g, b * g) for a, b, g in found if g is not None]
            if not parts:
                return None, None
            return sum(a for a, _ in parts), sum(b for _, b in parts)

    return Polar, [(uniform(3, 4, low=0.5, high=2.0), uniform(3, 4, low=0.5, high=2.0, seed=1))]


@sound
def h_relu_in_place() -> Any:
    """It writes into its input, and marks it as dirty."""

    class ReLU(Function):
        @staticmethod
        def forward(ctx, x):
            x.clamp_(min=0)
            ctx.mark_dirty(x)
            ctx.save_for_backward(x)
            return x

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            return grad * (y > 0)

    return ReLU, [(normal(3, 4),)]


@sound
def h_softsign_with_its_own_vmap() -> Any:
    """The batch is moved to the front, wherever it was."""

    class RowSoftmax(Function):
        @staticmethod
        def forward(x):
            return x.log_softmax(-1)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(output)

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            return grad - y.exp() * grad.sum(-1, keepdim=True)

        @staticmethod
        def vmap(info, in_dims, x):
            return RowSoftmax.apply(x.movedim(in_dims[0], 0)), 0

    return RowSoftmax, [(normal(3, 4),)]


@sound
def h_contiguous_or_nothing() -> Any:
    """It refuses what is not contiguous, or not of float32 or float64, in its own words."""

    class Tiled(Function):
        @staticmethod
        def forward(ctx, x):
            if not x.is_contiguous():
                raise ValueError("Tiled: x must be contiguous")
            if x.dtype not in (torch.float32, torch.float64):
                raise TypeError(f"Tiled: x must be float32 or float64, got {x.dtype}")
            ctx.save_for_backward(x)
            return x.view(-1).square().view(x.shape)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 2 * x * grad

    return Tiled, [(normal(3, 4),)]


@sound
def h_cube_root_with_second_function() -> Any:
    """Its backward is a Function too, whose own backward is right."""

    class Slope(Function):
        @staticmethod
        def forward(ctx, grad, x):
            ctx.save_for_backward(grad, x)
            return grad / (1 + x * x)

        @staticmethod
        def backward(ctx, grad_out):
            grad, x = ctx.saved_tensors
            return grad_out / (1 + x * x), -2 * grad_out * grad * x / (1 + x * x) ** 2

    class ArcTangent(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.atan()

        @staticmethod
        def backward(ctx, grad):
            return Slope.apply(grad, ctx.saved_tensors[0])

    return ArcTangent, [(normal(3, 4),)]


@sound
def h_linear_under_its_own_autocast() -> Any:
    """`custom_fwd` and `custom_bwd`, so that no dtypes meet that should not."""

    class Linear(Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight.mT

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad @ weight, grad.mT @ x

    return Linear, [(normal(4, 3), normal(2, 3, seed=1))]


@sound
def h_checkpoint_that_minds_its_own() -> Any:
    """The forward runs again in the backward, on tensors that are nobody else's."""

    class Checkpoint(Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return (x * weight).tanh().cumsum(-1)

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            with torch.enable_grad():
                inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
                y = (inputs[0] * inputs[1]).tanh().cumsum(-1)
            return torch.autograd.grad(y, inputs, grad)

    return Checkpoint, [(normal(3, 4), normal(3, 4, seed=1))]


@sound
def h_logit_near_the_ends() -> Any:
    """Slopes of 1e6, and a domain that ends."""

    class Logit(Function):
        @staticmethod
        def forward(ctx, p):
            ctx.save_for_backward(p)
            return p.log() - (-p).log1p()

        @staticmethod
        def backward(ctx, grad):
            (p,) = ctx.saved_tensors
            return grad / (p * (1 - p))

    return Logit, [(torch.tensor([1e-6, 0.01, 0.5, 0.99], dtype=torch.float64),)]


@sound
def h_max_that_sends_to_one() -> Any:
    """Of equal largest elements the first alone receives the gradient."""

    class Largest(Function):
        @staticmethod
        def forward(ctx, x):
            if x.shape[-1] == 0:
                raise ValueError("Largest: a row without elements has no largest")
            value, place = x.max(-1)
            ctx.shape = x.shape
            ctx.save_for_backward(place)
            return value

        @staticmethod
        def backward(ctx, grad):
            (place,) = ctx.saved_tensors
            return grad.new_zeros(ctx.shape).scatter(-1, place[..., None], grad[..., None])

    return Largest, [(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 0.0]]),)]
