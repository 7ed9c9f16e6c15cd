"""Right `autograd.Function`s of the awkward kind: in what they take, return, refuse, write and leave out."""

from typing import Any

import numpy as np
import torch
from entries import sound
from heldout_numbers import normal, uniform, whole
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import opsmith


@sound
def relu_in_place_marked_dirty() -> Any:
    class InplaceReLU(Function):
        @staticmethod
        def forward(ctx, x):
            x.relu_()
            ctx.mark_dirty(x)
            ctx.save_for_backward(x)
            return x

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            return grad * (y > 0)

    return InplaceReLU, [(normal(3, 4),)]


@sound
def in_place_inside_and_pure_outside() -> Any:
    """Temporaries are written over and over; arguments, results and saved tensors never."""

    class SoftplusLike(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            y = x.clone()
            y.abs_().neg_().exp_().log1p_()
            return y.add_(x.clamp(min=0))

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            slope = torch.empty_like(x)
            torch.sigmoid(x, out=slope)
            return slope.mul_(grad)

    return SoftplusLike, [(normal(3, 4),)]


@sound
def quantile_with_integer_places() -> Any:
    """Values, where they were, and how many were positive: one of three results has a gradient."""

    class Extremes(Function):
        @staticmethod
        def forward(ctx, x):
            if x.shape[-1] == 0:
                raise ValueError("Extremes: a row without elements has no largest")
            value, place = x.max(-1)
            positive = (x > 0).sum(-1)
            ctx.save_for_backward(place)
            ctx.columns = x.shape[-1]
            ctx.mark_non_differentiable(place, positive)
            return value, place, positive

        @staticmethod
        def backward(ctx, grad, _place, _positive):
            (place,) = ctx.saved_tensors
            by_x = grad.new_zeros(*grad.shape, ctx.columns)
            return by_x.scatter(-1, place[..., None], grad[..., None])

    return Extremes, [(normal(3, 5),)]


@sound
def mean_of_any_number() -> Any:
    """As many tensors as one likes."""

    class Mean(Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.count = len(tensors)
            return torch.stack(tensors).mean(0)

        @staticmethod
        def backward(ctx, grad):
            return (grad / ctx.count,) * ctx.count

    return Mean, [(normal(3, 4), normal(3, 4, seed=1), normal(3, 4, seed=2))]


@sound
def split_into_several() -> Any:
    """Two results, either of which may have no gradient coming in, and then is taken for None."""

    class Halves(Function):
        @staticmethod
        def forward(ctx, x):
            if x.shape[-1] % 2:
                raise ValueError(f"Halves: the width must be even, got {x.shape[-1]}")
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(x)
            first, second = x.chunk(2, -1)
            return first.exp(), second.sinh()

        @staticmethod
        def backward(ctx, by_first, by_second):
            if by_first is None and by_second is None:
                return None
            first, second = ctx.saved_tensors[0].chunk(2, -1)
            left = torch.zeros_like(first) if by_first is None else by_first * first.exp()
            right = torch.zeros_like(second) if by_second is None else by_second * second.cosh()
            return torch.cat([left, right], -1)

    return Halves, [(normal(3, 4),), (normal(6, seed=1),)]


@sound
def dropout_from_a_seed() -> Any:
    """Random and yet a function: the seed is an argument, and the generator its own."""

    class Dropout(Function):
        @staticmethod
        def forward(ctx, x, p, seed):
            keep = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) >= p
            ctx.save_for_backward(keep)
            ctx.scale = 1 / (1 - p)
            return x * keep * ctx.scale

        @staticmethod
        def backward(ctx, grad):
            (keep,) = ctx.saved_tensors
            return grad * keep * ctx.scale, None, None

    return Dropout, [(normal(3, 4), 0.4, 11)]


@sound
def dropout_by_a_given_mask() -> Any:
    class MaskedScale(Function):
        @staticmethod
        def forward(ctx, x, mask, p):
            ctx.save_for_backward(mask)
            ctx.p = p
            return x * mask / (1 - p)

        @staticmethod
        def backward(ctx, grad):
            (mask,) = ctx.saved_tensors
            return grad * mask / (1 - ctx.p), None, None

    return MaskedScale, [(normal(3, 4), normal(3, 4, seed=1) > 0, 0.2)]


@sound
def interpolation_by_numpy() -> Any:
    """NumPy on both ways; the second order is refused, which is no fault."""

    class Sinc(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.as_tensor(np.exp(np.sin(x.detach().numpy())))

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            x = ctx.saved_tensors[0].detach().numpy()
            return grad * torch.as_tensor(np.exp(np.sin(x)) * np.cos(x))

    return Sinc, [(normal(3, 4),)]


@sound
def affine_with_parts_left_out() -> Any:
    """Scale and shift are optional, each by itself."""

    class Affine(Function):
        @staticmethod
        def forward(ctx, x, scale, shift):
            ctx.save_for_backward(x, scale)
            ctx.shifted = shift is not None
            y = x.clone() if scale is None else x * scale
            return y if shift is None else y + shift

        @staticmethod
        def backward(ctx, grad):
            x, scale = ctx.saved_tensors
            by_x = grad if scale is None else grad * scale
            by_scale = None if scale is None else (grad * x).sum(0)
            return by_x, by_scale, grad.sum(0) if ctx.shifted else None

    return Affine, [
        (normal(4, 3), normal(3, seed=1), normal(3, seed=2)),
        (normal(4, 3), None, normal(3, seed=2)),
        (normal(4, 3), normal(3, seed=1), None),
    ]


@sound
def broadcast_left_to_the_engine() -> Any:
    """Gradients of the shape of the result; autograd sums them to the shapes of the inputs."""

    class Affine(Function):
        @staticmethod
        def forward(ctx, x, scale, shift):
            ctx.save_for_backward(x, scale)
            return x * scale + shift

        @staticmethod
        def backward(ctx, grad):
            x, scale = ctx.saved_tensors
            return grad * scale, grad * x, grad

    return Affine, [(normal(2, 4, 3), normal(3, seed=1), normal(4, 1, seed=2))]


@sound
def rows_of_even_width_only() -> Any:
    """It takes matrices of even width, contiguous and not empty, and says so about all others."""

    class SwapHalves(Function):
        @staticmethod
        def forward(ctx, x):
            if x.dim() != 2 or x.shape[1] % 2:
                raise ValueError(f"SwapHalves: a matrix of even width is needed, got {list(x.shape)}")
            if not x.is_contiguous():
                raise ValueError("SwapHalves: x must be contiguous")
            if x.numel() == 0:
                raise ValueError("SwapHalves: there are no elements")
            return x.roll(x.shape[1] // 2, 1)

        @staticmethod
        def backward(ctx, grad):
            return grad.roll(grad.shape[1] // 2, 1)

    return SwapHalves, [(normal(3, 4),)]


@sound
def histogram_of_whole_numbers() -> Any:
    """A tensor of whole numbers that has no gradient, beside weights that have."""

    class WeightedCount(Function):
        @staticmethod
        def forward(ctx, weights, bins, count):
            ctx.save_for_backward(bins)
            return weights.new_zeros(count).index_add(0, bins, weights)

        @staticmethod
        def backward(ctx, grad):
            (bins,) = ctx.saved_tensors
            return grad[bins], None, None

    return WeightedCount, [(uniform(6), whole(6, high=4), 4)]


@sound
def checkpoint_of_its_own_copies() -> Any:
    class Checkpoint(Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return torch.tanh(x * weight)

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            with torch.enable_grad():
                inputs = [each.detach().requires_grad_() for each in ctx.saved_tensors]
                y = torch.tanh(inputs[0] * inputs[1])
            return torch.autograd.grad(y, inputs, grad)

    return Checkpoint, [(normal(3, 4), normal(3, 4, seed=1))]


@sound
def table_cached_by_all_that_it_depends_on() -> Any:
    """State that is kept between calls, and changes nothing."""
    tables: dict[tuple[int, float], torch.Tensor] = {}

    class AddPositions(Function):
        @staticmethod
        def forward(ctx, x, base):
            key = (x.shape[-1], base)
            if key not in tables:
                tables[key] = torch.sin(base * torch.arange(x.shape[-1], dtype=torch.float64))
            return x + tables[key].to(x.dtype)

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    return AddPositions, [(normal(3, 4), 0.1), (normal(3, 4), 0.2)]


@sound
def product_that_computes_what_is_needed() -> Any:
    class ScaledExp(Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, y)
            return x * y.exp()

        @staticmethod
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            by_x = grad * y.exp() if ctx.needs_input_grad[0] else None
            by_y = grad * x * y.exp() if ctx.needs_input_grad[1] else None
            return by_x, by_y

    return ScaledExp, [(normal(3, 4), normal(3, 4, seed=1))]


@sound
def sum_that_expands_its_gradient() -> Any:
    """Its gradient has stride zero, and shares its memory with grad_output."""

    class Total(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.shape = x.shape
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            return grad.expand(ctx.shape)

    return Total, [(normal(3, 4),)]


@sound
def spike_with_its_own_tangent() -> Any:
    """A surrogate in both modes, in place and marked dirty, with a None more than `apply` needs."""

    class Spike(Function):
        @staticmethod
        def forward(ctx, x, width: float):
            ctx.inside = x.abs() < width
            x.gt_(0)
            ctx.mark_dirty(x)
            return x

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.inside, None, None

        @staticmethod
        def jvp(ctx, tangent, _):
            return tangent.mul_(ctx.inside)

    samples = [(normal(3, 4), 2.0)]
    return opsmith.adopt(Spike, "corpus::own_spike", kind="surrogate", samples=samples), None


@sound
def running_norm_in_a_module() -> Any:
    """It updates the running mean of a module in training, as such a module does."""

    class Normalised(Function):
        @staticmethod
        def forward(ctx, x, norm):
            centred = x - norm.running_mean
            norm.running_mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            return centred.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad.clone(), None

    return Normalised, [(normal(3, 4), torch.nn.BatchNorm1d(4))]


@sound
def module_run_again_for_what_needs_it() -> Any:
    """It asks each parameter of the module whether it is frozen, and is given one that is."""

    class Recomputed(Function):
        @staticmethod
        def forward(ctx, x, module):
            ctx.module = module
            ctx.save_for_backward(x)
            with torch.no_grad():
                return module(x)

        @staticmethod
        def backward(ctx, grad):
            again = torch.enable_grad()
            with again:
                x = ctx.saved_tensors[0].view_as(ctx.saved_tensors[0])
                x = x if x.requires_grad else x.requires_grad_()
                (by_x,) = torch.autograd.grad(ctx.module(x), x, grad, create_graph=True)
            return by_x, None

    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh())
    module[0].weight.requires_grad_(False)
    return Recomputed, [(normal(3, 4), module)]
