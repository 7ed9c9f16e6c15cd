"""Held out: interpolation, splines, rasterisers, wavelets, rotations as `autograd.Function`s, and wrong."""

from typing import Any

import torch
import torch.nn.functional as F
from entries import planted
from heldout_numbers import normal, uniform, whole
from torch.autograd import Function
from torch.autograd.function import once_differentiable


@planted("linear_interpolation", "shifted", input="table")
def h_interpolation_of_the_next_cell() -> Any:
    """The gradient of the table goes one entry too far to the right."""

    class Interpolate(Function):
        @staticmethod
        def forward(ctx, table, at):
            cell = at.detach().floor().clamp(0, table.shape[0] - 2).long()
            ctx.save_for_backward(table, at, cell)
            part = at - cell
            return (1 - part) * table[cell] + part * table[cell + 1]

        @staticmethod
        def backward(ctx, grad):
            table, at, cell = ctx.saved_tensors
            part, n = at - cell, table.shape[0]
            spread = grad.new_zeros(n)
            spread = spread.index_add(0, (cell + 1) % n, (1 - part) * grad)
            spread = spread.index_add(0, (cell + 2) % n, part * grad)
            return spread, grad * (table[cell + 1] - table[cell])

    return Interpolate, [(normal(6), uniform(5, low=0.2, high=4.8, seed=1))]


@planted("catmull_rom", "region", input="at")
def h_spline_in_the_last_cell() -> Any:
    """The slope along a cubic spline is right but in the last cell, where that of a line is returned."""

    class Spline(Function):
        @staticmethod
        def forward(ctx, knots, at):
            cell = at.floor().clamp(0, knots.shape[0] - 2).long()
            ctx.save_for_backward(knots, at, cell)
            (a, b, c, d), _ = Spline.around(knots, at, cell)
            t = at - cell
            return a * t**3 + b * t**2 + c * t + d

        @staticmethod
        def around(knots, at, cell):
            padded = torch.cat([knots[:1], knots, knots[-1:]])
            p = [padded[cell + i] for i in range(4)]
            a = -0.5 * p[0] + 1.5 * p[1] - 1.5 * p[2] + 0.5 * p[3]
            b = p[0] - 2.5 * p[1] + 2 * p[2] - 0.5 * p[3]
            return (a, b, 0.5 * (p[2] - p[0]), p[1]), p

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            knots, at, cell = ctx.saved_tensors
            (a, b, c, _), p = Spline.around(knots, at, cell)
            t = at - cell
            slope = torch.where(cell == knots.shape[0] - 2, p[2] - p[1], 3 * a * t**2 + 2 * b * t + c)
            with torch.enable_grad():
                free = knots.detach().requires_grad_()
                (e, f, g, h), _ = Spline.around(free, at, cell)
                (by_knots,) = torch.autograd.grad(e * t**3 + f * t**2 + g * t + h, free, grad)
            return by_knots, grad * slope

    return Spline, [(normal(5), uniform(7, low=0.1, high=3.9, seed=4))]


@planted("haar", "scale", input="x")
def h_haar_without_the_root() -> Any:
    """The transform is orthonormal, the backward divides by 2 where sqrt(2) is right."""

    class Haar(Function):
        @staticmethod
        def forward(ctx, x):
            if x.shape[-1] % 2:
                raise ValueError(f"Haar: the length must be even, got {x.shape[-1]}")
            even, odd = x[..., ::2], x[..., 1::2]
            return torch.cat([even + odd, even - odd], -1) / 2**0.5

        @staticmethod
        def backward(ctx, grad):
            low, high = grad.chunk(2, -1)
            return torch.stack([low + high, low - high], -1).flatten(-2) / 2

    return Haar, [(normal(3, 4),), (normal(6, seed=1),)]


@planted("rotary", "unknown", input="x", also=("sign", "transposed"))
def h_rotary_turned_on() -> Any:
    """J. Su et al., 2021: the gradient is to be turned back, and is turned on by the same angle."""

    class Rotary(Function):
        @staticmethod
        def turn(x, position):
            first, second = x.chunk(2, -1)
            angle = position[:, None] * 10.0 ** -torch.arange(first.shape[-1], dtype=x.dtype)
            c, s = angle.cos(), angle.sin()
            return torch.cat([first * c - second * s, first * s + second * c], -1)

        @staticmethod
        def forward(ctx, x, position):
            ctx.save_for_backward(position)
            return Rotary.turn(x, position)

        @staticmethod
        def backward(ctx, grad):
            (position,) = ctx.saved_tensors
            return Rotary.turn(grad, position), None

    return Rotary, [(normal(2, 3, 4), torch.arange(1, 4))]


@planted("splat", "region", input="centre", also=("missing-term",))
def h_splat_on_the_border() -> Any:
    """A rasteriser of soft points, whose centres get no gradient from the first and the last pixel."""

    class Splat(Function):
        @staticmethod
        def forward(ctx, centre, colour, width):
            ctx.save_for_backward(centre, colour)
            ctx.width = width
            pixels = torch.arange(width, dtype=centre.dtype)
            weight = torch.exp(-0.5 * (pixels - centre[:, None]).square())
            return (weight * colour[:, None]).sum(0)

        @staticmethod
        def backward(ctx, grad):
            centre, colour = ctx.saved_tensors
            pixels = torch.arange(ctx.width, dtype=centre.dtype)
            offset = pixels - centre[:, None]
            weight = torch.exp(-0.5 * offset.square())
            inside = ((pixels > 0) & (pixels < ctx.width - 1)).to(grad.dtype)
            by_centre = (grad * inside * weight * offset).sum(-1) * colour
            return by_centre, (grad * weight).sum(-1), None

    return Splat, [(uniform(3, low=0.0, high=5.0), normal(3, seed=1), 6)]


@planted("min_plus", "held")
def h_distance_transform_that_holds_itself() -> Any:
    """P. Felzenszwalb and D. Huttenlocher, 2012; the result is kept as an attribute of its own node."""

    class DistanceTransform(Function):
        @staticmethod
        def forward(ctx, cost):
            place = torch.arange(cost.shape[-1], dtype=cost.dtype)
            paths = cost[..., None, :] + (place[:, None] - place).square()
            found, ctx.origin = paths.min(-1)
            ctx.found = found
            return found

        @staticmethod
        def backward(ctx, grad):
            return torch.zeros_like(ctx.found).scatter_add(-1, ctx.origin, grad)

    return DistanceTransform, [(normal(3, 5),), (normal(4, seed=1),)]


@planted("sparse_gather", "layout", input="values", also=("missing-gradient",))
def h_gather_into_a_copy() -> Any:
    """The zeros lie in memory as the values do; where those are not contiguous, a copy is filled."""

    class Gather(Function):
        @staticmethod
        def forward(ctx, values, index):
            ctx.save_for_backward(values, index)
            return values.reshape(-1)[index]

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            values, index = ctx.saved_tensors
            found = torch.zeros_like(values)
            found.contiguous().view(-1).index_add_(0, index, grad)
            return found, None

    return Gather, [(normal(3, 4), whole(5, high=12)), (normal(2, 6, seed=1), torch.tensor([0, 11, 0]))]


@planted("grid_points", "mutates-input", input="points")
def h_normalised_coordinates_in_place() -> Any:
    """Points of -1 to 1 become pixels, and those of the caller too."""

    class Sample(Function):
        @staticmethod
        def forward(ctx, image, points):
            points.data.add_(1).mul_((image.shape[-1] - 1) / 2)
            cell = points.detach().floor().clamp(0, image.shape[-1] - 2).long()
            part = points.detach() - cell
            ctx.save_for_backward(image, cell, part)
            return (1 - part) * image[cell] + part * image[cell + 1]

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            image, cell, part = ctx.saved_tensors
            spread = torch.zeros_like(image)
            spread = spread.index_add(0, cell, (1 - part) * grad).index_add(0, cell + 1, part * grad)
            slope = (image[cell + 1] - image[cell]) * (image.shape[-1] - 1) / 2
            return spread, grad * slope

    return Sample, [(normal(6), uniform(4, low=-0.9, high=0.9, seed=1))]


@planted("depthwise_convolution", "shifted", input="weight")
def h_causal_convolution_one_step_late() -> Any:
    class CausalConvolution(Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return F.conv1d(F.pad(x, (weight.shape[-1] - 1, 0)), weight[:, None], groups=x.shape[1])

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            width = weight.shape[-1]
            spread = F.pad(grad, (0, width - 1))
            by_x = F.conv1d(spread, weight.flip(-1)[:, None], groups=x.shape[1])
            padded = F.pad(x, (width - 1, 0))
            length = x.shape[-1]
            taps = [(grad * padded[..., i : i + length]).sum((0, 2)) for i in range(width)]
            return by_x, torch.stack(taps, -1).roll(1, -1)

    return CausalConvolution, [(normal(2, 3, 6), normal(3, 4, seed=1))]


@planted("polar", "missing-gradient", input="x")
def h_polar_when_the_radius_is_unused() -> Any:
    """Without a gradient for the radius, that of the angle is forgotten too."""

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
            along_x = along_y = None
            if by_radius is not None:
                along_x, along_y = by_radius * x / square.sqrt(), by_radius * y / square.sqrt()
            if by_angle is not None and along_x is not None:
                along_x = along_x - by_angle * y / square
            if by_angle is not None:
                turned = by_angle * x / square
                along_y = turned if along_y is None else along_y + turned
            return along_x, along_y

    return Polar, [(normal(3, 4), normal(3, 4, seed=1))]


@planted("log_determinant", "transposed", input="matrix")
def h_log_determinant_not_transposed() -> Any:
    """The gradient of log|A| is the inverse, transposed."""

    class LogDeterminant(Function):
        @staticmethod
        def forward(ctx, matrix):
            ctx.save_for_backward(matrix)
            return torch.linalg.slogdet(matrix)[1]

        @staticmethod
        def backward(ctx, grad):
            (matrix,) = ctx.saved_tensors
            return grad[..., None, None] * torch.linalg.inv(matrix)

    return LogDeterminant, [(normal(3, 3) + 2 * torch.eye(3),)]
