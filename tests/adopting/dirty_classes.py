"""Classes that mark arguments as dirty, what each computes, and all that a caller sees of a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith


class Doubles(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad


class Sigmoid(Function):
    """It saves its result, and its `jvp` writes into the tangent, as torch wants it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.sigmoid_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return grad * y * (1 - y)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return tangent.mul_(y * (1 - y))


class Squares(Function):
    """It keeps the value from before, of which a second order needs the history."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.clone())
        ctx.mark_dirty(x)
        return x.mul_(x.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad * ctx.saved_tensors[0]


class BySetup(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, by: float) -> Tensor:
        return x.mul_(by)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, ctx.by = inputs
        ctx.mark_dirty(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.by * grad, None


class WithSign(Function):
    """Two results, one of which is the input and the other a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        sign = x.sign()
        ctx.mark_dirty(x.abs_())
        ctx.mark_non_differentiable(sign)
        ctx.save_for_backward(sign)
        return sign, x

    @staticmethod
    def backward(ctx: Any, _: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0]


class WithTotal(Function):
    """Two results with gradients, of which any may be missing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        ctx.shape = x.shape
        x.mul_(3)
        return x.sum(), x

    @staticmethod
    def backward(ctx: Any, total: Tensor | None, grad: Tensor | None) -> Any:
        parts = [] if total is None else [3 * total.expand(ctx.shape)]
        parts += [] if grad is None else [3 * grad]
        return sum(parts[1:], parts[0]) if parts else None


class WritesTwo(Function):
    """Two inputs are written, and returned in another order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, by: float = 3.0) -> Any:
        ctx.by = by
        ctx.mark_dirty(x, y)
        y.mul_(by)
        x.add_(y)
        return y, x

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, grad_x: Tensor) -> Any:
        return grad_x, ctx.by * (grad_x + grad_y), None


class WritesSecond(Function):
    """The second argument is written; it is saved as it is after the write."""

    @staticmethod
    def forward(ctx: Any, scale: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(scale, x.clone())
        ctx.mark_dirty(x)
        return x.mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        scale, x = ctx.saved_tensors
        return (grad * x).sum(0), grad * scale


class Marks(Function):
    """It marks, and writes nothing: the version rises all the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 5 * grad


class Clips(Function):
    """It writes where a flag says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool = False) -> Tensor:
        if inplace:
            ctx.mark_dirty(x)
            y = x.relu_()
        else:
            y = x.relu()
        ctx.save_for_backward(y > 0)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None


class Wholes(Function):
    """It marks a tensor of whole numbers as a constant, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Tensor) -> Any:
        ctx.mark_dirty(counts)
        ctx.mark_non_differentiable(counts)
        counts.add_(1)
        return x * 2, counts

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        return 2 * grad, None


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    """A class, its arguments, the positions of those that it writes, and the function that it computes."""

    cls: type[Function]
    make: Callable[[], tuple[Any, ...]]
    written: tuple[int, ...]
    truth: Callable[..., Any]

    @property
    def operator(self) -> opsmith.Operator[..., Any]:
        name = self.cls.__name__.lower()
        return opsmith.adopt(self.cls, f"dirty::{name}_{len(self.make())}_{self.make()[-1] is True}".lower())


def one() -> tuple[Any, ...]:
    return (numbers(3, 4),)


CASES = {
    "doubles": Case(Doubles, one, (0,), lambda x: 2 * x),
    "sigmoid": Case(Sigmoid, one, (0,), torch.sigmoid),
    "squares": Case(Squares, one, (0,), torch.square),
    "by_setup": Case(BySetup, lambda: (numbers(3, 4), 1.5), (0,), torch.mul),
    "with_sign": Case(WithSign, one, (0,), lambda x: (x.sign().detach(), x.abs())),
    "with_total": Case(WithTotal, one, (0,), lambda x: (3 * x.sum(), 3 * x)),
    "writes_two": Case(
        WritesTwo,
        lambda: (numbers(3, 4), numbers(3, 4, seed=1)),
        (0, 1),
        lambda x, y: (3 * y, x + 3 * y),
    ),
    "writes_second": Case(
        WritesSecond, lambda: (numbers(4, seed=1), numbers(3, 4)), (1,), lambda scale, x: scale * x
    ),
    "marks": Case(Marks, one, (0,), lambda x: x + 4 * (x - x.detach())),
    "clips": Case(Clips, lambda: (numbers(3, 4), True), (0,), lambda x, _: x.clamp(0)),
    "clips_not": Case(Clips, lambda: (numbers(3, 4), False), (), lambda x, _: x.clamp(0)),
    "wholes": Case(
        Wholes, lambda: (numbers(3, 4), torch.arange(3)), (1,), lambda x, counts: (2 * x, counts + 1)
    ),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
true_derivative = pytest.mark.parametrize(
    "case", [pytest.param(case, id=name) for name, case in CASES.items() if name not in ("marks", "wholes")]
)


def transposed(value: Tensor) -> Tensor:
    return value.mT.contiguous().mT if value.dim() > 1 else value.clone()


def at_an_offset(value: Tensor) -> Tensor:
    return torch.cat([value.new_ones((1, *value.shape[1:])), value])[1:]


def of_every_second(value: Tensor) -> Tensor:
    return torch.stack([value, value], -1)[..., 1]


LAYOUTS = {
    "contiguous": torch.clone,
    "transposed": transposed,
    "at_an_offset": at_an_offset,
    "of_every_second": of_every_second,
}


def results_of(returned: Any) -> tuple[Any, ...]:
    return returned if isinstance(returned, tuple) else (returned,)


@dataclass
class Observed:
    """All that a caller can see of one call."""

    arguments: list[Any]
    results: list[Tensor]
    same: list[list[bool]]
    rose: list[bool]
    requires: list[bool]
    same_node: list[bool]
    gradients: list[Tensor]
    bases: list[Tensor]


def observed(call: Any, case: Case, layout: str, mode: str) -> Observed:
    """One call, on tensors that are computed from leaves."""
    recorded = mode == "recorded"
    context = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(mode, torch.enable_grad)
    with context():
        leaves = [
            value.requires_grad_(recorded)
            if isinstance(value, Tensor) and value.is_floating_point()
            else value
            for value in case.make()
        ]
        given = [LAYOUTS[layout](value) if isinstance(value, Tensor) else value for value in leaves]
        versions = [0 if mode == "inference" else each._version for each in given if isinstance(each, Tensor)]
        results = results_of(call(*given))
        tensors = [each for each in given if isinstance(each, Tensor)]
        rose = [
            mode == "inference" or each._version > before
            for each, before in zip(tensors, versions, strict=True)
        ]
        asking = [each for each in leaves if isinstance(each, Tensor) and each.requires_grad]
        ends = [each for each in (*results, *tensors) if each.requires_grad]
        total = sum(((each * torch.linspace(1, 2, 4)).sum() for each in ends), torch.zeros(()))
        gradients = torch.autograd.grad(total, asking, allow_unused=True) if ends else ()
        return Observed(
            [each.detach().clone() if isinstance(each, Tensor) else each for each in given],
            [each.detach().clone() for each in results],
            [[result is each for each in given] for result in results],
            rose,
            [each.requires_grad for each in (*results, *tensors)],
            [results[-1].grad_fn is each.grad_fn for each in tensors],
            list(gradients),
            [each._base.detach().clone() for each in tensors if each._base is not None],
        )


class ByHelper(Function):
    """Its source does not show what it marks: a function from a table does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool) -> Tensor:
        y = x.neg_() if inplace else x.neg()
        HELPERS["mark"](ctx, x, inplace)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -grad, None


def mark(ctx: Any, x: Tensor, inplace: bool) -> None:
    if inplace:
        ctx.mark_dirty(x)


HELPERS = {"mark": mark}


class MarksArguments(Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Any:
        ctx.mark_dirty(tensors[0])
        return (tensors[0].mul_(2), tensors[1] * 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return 2 * grads[0], grads[1]
