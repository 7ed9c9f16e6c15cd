"""Function classes that keep what their backward needs in every way that `ctx` has."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class OldStyle(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.save_for_backward(x, w)
        return (x * w).tanh() * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        t = (x * w).tanh()
        return grad * (t + x * w * (1 - t**2)), grad * x * x * (1 - t**2)


class SetupContext(Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Any:
        return (x * w).tanh() * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    backward = OldStyle.backward


class ResultSaved(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        y = (x * w).exp()
        ctx.save_for_backward(x, y, w)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y, w = ctx.saved_tensors
        return grad * y * w, grad * y * x


class SavedTwice(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.save_for_backward(x, x, w)
        return x * x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, again, w = ctx.saved_tensors
        return 2 * grad * again * w, grad * x * x


class NoneSaved(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.save_for_backward(None, x, None, w)
        return x * x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        nothing, x, none, w = ctx.saved_tensors
        assert nothing is none is None
        return 2 * grad * x * w, grad * x * x


class MarkedDirty(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.mark_dirty(x)
        ctx.save_for_backward(w)
        return x.mul_(w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None


class SavedForForward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.save_for_backward(x, w)
        ctx.save_for_forward(x * 2, w)
        return x * x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return 2 * grad * x * w, grad * x * x

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        x, w = ctx.saved_tensors
        return x * w * tangents[0]


class OnceDifferentiable(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.save_for_backward(x, w)
        return x * x * w

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return 2 * grad * x * w, grad * x * x


class TwoResults(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        ctx.save_for_backward(x, positive, w)
        return x * x * w, positive

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        x, positive, w = ctx.saved_tensors
        return 2 * grad * x * w * positive, grad * x * x


LIKE_APPLY = (
    OldStyle,
    SetupContext,
    ResultSaved,
    SavedTwice,
    NoneSaved,
    MarkedDirty,
    SavedForForward,
    OnceDifferentiable,
    TwoResults,
)
"""Classes that save by `save_for_backward` alone, of which autograd saves exactly these tensors."""


class OnTheWay(Function):
    """It saves a value that has no graph: a second order needs the inputs, which are saved, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        t = (x * w).tanh()
        ctx.save_for_backward(t, x)
        ctx.w = w
        return t * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        t, x = ctx.saved_tensors
        return grad * (t + x * ctx.w * (1 - t**2)), grad * x * x * (1 - t**2)


class Attributes(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.w, ctx.x, ctx.by = w, x, 2
        return x * x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.by * grad * ctx.x * ctx.w, grad * ctx.x * ctx.x


class AttributeAndSaved(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.square = x * x
        ctx.w = w
        ctx.save_for_backward(w, x)
        return ctx.square * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _, x = ctx.saved_tensors
        return 2 * grad * x * ctx.w, grad * ctx.square


class InAList(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.both = [x, (w, "w")]
        ctx.save_for_backward(w)
        return x * x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, (w, _) = ctx.both
        return 2 * grad * x * w, grad * x * x


MORE = {OnTheWay: 3, Attributes: 2, AttributeAndSaved: 3, InAList: 2}
"""Classes that keep tensors in other ways, and the number of distinct tensors that are saved."""


def formula(function_class: type[Function], x: Tensor, w: Tensor) -> Tensor:
    """The mathematics of a class in operations of torch."""
    if function_class in (OldStyle, SetupContext, OnTheWay):
        return (x * w).tanh() * x
    if function_class is ResultSaved:
        return (x * w).exp()
    return x * w if function_class is MarkedDirty else x * x * w
