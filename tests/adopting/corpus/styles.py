"""Styles of classes: classmethods, inherited, nested, made by factories, with rules of their own."""

from __future__ import annotations

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from corpus.entry import F64, ONCE, Entry, samples


class ScaledTanh(Function):
    """Classmethods that read the class's attributes."""

    gain = 1.7

    @classmethod
    def forward(cls, ctx, x):
        result = x.tanh()
        ctx.save_for_backward(result)
        return cls.gain * result

    @classmethod
    def backward(cls, ctx, grad):
        (result,) = ctx.saved_tensors
        return grad * cls.gain * (1 - result * result)


class SteeperTanh(ScaledTanh):
    """Inherits both methods and changes what they read."""

    gain = 2.5


class _Monomial(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError


class Cube(_Monomial):
    """Takes the forward of its base and has a backward of its own."""

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * grad * x * x


class Activations:
    """A namespace that holds its Functions."""

    class Gaussian(Function):
        @staticmethod
        def forward(ctx, x):
            result = (-x * x).exp()
            ctx.save_for_backward(x, result)
            return result

        @staticmethod
        def backward(ctx, grad):
            x, result = ctx.saved_tensors
            return -2 * grad * x * result


def power(exponent: int) -> type[Function]:
    """A Function whose exponent is in its closure: every one made here has the same qualified name."""

    class Power(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**exponent

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * exponent * x ** (exponent - 1)

    return Power


Made = type(
    "Made",
    (Function,),
    {
        "forward": staticmethod(lambda ctx, x: x.neg()),
        "backward": staticmethod(lambda ctx, grad: grad.neg()),
    },
)
"""No `class` statement at all."""


class MulWithVmapRule(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, y):
        return x * y

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y, grad * x


class SortWithVmap(Function):
    """Its own rule for vmap."""

    @staticmethod
    def forward(x):
        values, places = x.sort(dim=0)
        return values, places

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx, grad, _):
        (places,) = ctx.saved_tensors
        return torch.zeros_like(grad).scatter(0, places, grad)

    @staticmethod
    def vmap(info, in_dims, x):
        values, places = x.movedim(in_dims[0], 0).sort(dim=1)
        return (values, places), (0, 0)


class CubeWithJvp(Function):
    """Saves for forward mode in the old style, and has its jvp."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2

    @staticmethod
    def jvp(ctx, tangent):
        (x,) = ctx.saved_tensors
        return tangent * 3 * x**2


class ProductWithJvp(Function):
    """Every rule at once: setup_context, jvp, and a plain argument."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, y, factor):
        return factor * x * y

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, y, ctx.factor = inputs
        ctx.save_for_backward(x, y)
        ctx.save_for_forward(x, y)

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * ctx.factor * y, grad * ctx.factor * x, None

    @staticmethod
    def jvp(ctx, tangent_x, tangent_y, _):
        x, y = ctx.saved_tensors
        return ctx.factor * (tangent_x * y + x * tangent_y)


class SinOnce(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.cos()


class CosOnce(Function):
    """Once differentiable, and adopted with a reference."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.cos()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return -grad * x.sin()


_one = samples(lambda make: [(make(3, 4),), (make(4, 3).mT,), (make(4, 6)[:, ::2],)])

ENTRIES = [
    Entry(
        "scaled_tanh",
        ScaledTanh,
        _one,
        F64,
        ("classmethods",),
        truth=lambda x: 1.7 * x.tanh(),
        second="truth",
    ),
    Entry(
        "steeper_tanh",
        SteeperTanh,
        _one,
        F64,
        ("classmethods", "inherited"),
        truth=lambda x: 2.5 * x.tanh(),
        second="truth",
    ),
    Entry("cube", Cube, _one, F64, ("inherited",), truth=lambda x: x**3),
    Entry("gaussian", Activations.Gaussian, _one, F64, ("nested class", "saves its result")),
    Entry("square", power(2), _one, F64, ("made by a factory",), truth=lambda x: x**2),
    Entry("fourth_power", power(4), _one, F64, ("made by a factory",), truth=lambda x: x**4),
    Entry("negated", Made, _one, F64, ("made by type()", "types from samples"), needs_samples=True),
    Entry(
        "mul_with_vmap_rule",
        MulWithVmapRule,
        samples(lambda make: [(make(3, 4), make(3, 4)), (make(4, 3).mT, make(3, 4))]),
        F64,
        ("generate_vmap_rule", "setup_context"),
    ),
    Entry(
        "sort_with_vmap",
        SortWithVmap,
        samples(lambda make: [(make(5),), (make(3, 4),), (make(4, 3).mT,)]),
        (F64, "int64"),
        ("vmap", "setup_context"),
    ),
    Entry("cube_with_jvp", CubeWithJvp, _one, F64, ("jvp", "save_for_forward"), truth=lambda x: x**3),
    Entry(
        "product_with_jvp",
        ProductWithJvp,
        samples(lambda make: [(make(3, 4), make(3, 4), 2.0), (make(4, 3).mT, make(3, 4), -0.5)]),
        F64,
        ("jvp", "generate_vmap_rule", "setup_context", "save_for_forward"),
        needs_samples=True,
    ),
    Entry(
        "sin_once",
        SinOnce,
        _one,
        F64,
        ("once_differentiable",),
        second="refused",
        jvp=False,
        refused={"second": ONCE},
    ),
    Entry(
        "cos_once",
        CosOnce,
        _one,
        F64,
        ("once_differentiable", "reference"),
        options={"reference": torch.cos},
        truth=torch.cos,
        second="truth",
    ),
]
