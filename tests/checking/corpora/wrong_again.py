"""Function classes whose gradients depend on how one asks for them."""

from typing import Any

import torch
from class_mutants import Twice, matrix, mutant, twin
from torch.autograd import Function
from torch.autograd.function import once_differentiable


@mutant("backward_again", "stale-state", "x", ", of a backward with `create_graph=True`: at", "mutates-saved")
def rounds_where_a_graph_is_made() -> Any:
    class Rounds(Twice):
        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            right = Twice.backward(ctx, grad)
            return right * 1.25 if torch.is_grad_enabled() else right

    return Rounds, matrix()


@mutant("backward_again", "unknown", "x", ", where the arguments are not leaves: at")
def minds_leaves() -> Any:
    class Minds(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.factor = 1 if x.is_leaf else 3
            return Twice.forward(ctx, x)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return ctx.factor * Twice.backward(ctx, grad)

    return Minds, matrix()


@mutant("backward_again", "side-effect", "x", ", by two `.backward()`s into the same `.grad`: at", "leak")
def gives_once() -> Any:
    """A gradient that is there already is not given again."""

    class Once(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.has = x.is_leaf and x.grad is not None and bool((x.grad != 3).any())
            return Twice.forward(ctx, x)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            right = Twice.backward(ctx, grad)
            return 0 * right if ctx.has else right

    return Once, matrix()


@mutant(
    "backward_again",
    "raises",
    None,
    "by two `.backward()`s into the same `.grad`: it raises ValueError: there is",
)
def refuses_to_add() -> Any:
    class Refuses(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            if x.is_leaf and x.grad is not None:
                raise ValueError("there is a gradient already")
            return Twice.forward(ctx, x)

    return Refuses, matrix()


@twin
def differentiable_once() -> Any:
    class Squares(Twice):
        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad: Any) -> Any:
            (x,) = ctx.saved_tensors
            return 2 * grad * x

    return Squares, matrix()


@twin
def clips_its_gradient() -> Any:
    """It is not linear, which is another matter."""

    class Clips(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad.clamp(-0.5, 0.5)

    return Clips, matrix()
