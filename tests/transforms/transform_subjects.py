"""Operators of every kind of declaration, each beside the plain function that it must agree with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import opsmith
from opsmith.ops.involution import involution_input_gradient, involution_weight_gradient

BATCH = 3


@dataclass(frozen=True)
class Subject:
    """One operator as a function of tensors alone, beside the plain function that it must agree with.

    `writes` is true where autograd records operations that write.
    """

    name: str
    operator: Callable[..., Any]
    plain: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    low: float = -2.0
    writes: bool = False

    def inputs(self, *, batch: bool = False) -> tuple[Tensor, ...]:
        """Float64 inputs from a fixed seed; with a leading batch dimension if asked."""
        make = opsmith.Make(generator=torch.Generator().manual_seed(1))
        lead = (BATCH,) if batch else ()
        return tuple(make(*lead, *shape, low=self.low) for shape in self.shapes)


@opsmith.operator("transforms::gate")
def gate(x: Tensor, w: Tensor, scale: float = 1.0) -> Tensor:
    return x * torch.tanh(w) * scale


gate.gradients(
    x=lambda grad, w, scale: grad * w.tanh() * scale,
    w=lambda grad, x, w, scale: grad * x * (1 - w.tanh() ** 2) * scale,
)


@opsmith.operator("transforms::partly")
def partly(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).sin()


partly.gradients(x=lambda grad, x, w: grad * w * (x * w).cos())


@opsmith.operator("transforms::derived")
def derived(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).sin()


@opsmith.operator("transforms::with_kernel")
def with_kernel(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).sin()


@with_kernel.kernel("cpu")
def _(x: Tensor, w: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(np.sin(x.numpy() * w.numpy())))


@opsmith.operator("transforms::joint")
def joint(x: Tensor, w: Tensor) -> Tensor:
    return x * w.exp()


@joint.gradients
def _(grad: Tensor, x: Tensor, w: Tensor) -> dict[str, Tensor]:
    return {"x": grad * w.exp(), "w": grad * x * w.exp()}


@opsmith.operator("transforms::norm", hidden=("mean", "rstd"))
def norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.mean(-1, keepdim=True)
    rstd = (x.var(-1, unbiased=False, keepdim=True) + eps).rsqrt()
    return (x - mean) * rstd * weight, mean, rstd


def _norm_x(grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    scaled, unit = grad * weight, (x - mean) * rstd
    return (scaled - scaled.mean(-1, keepdim=True) - unit * (scaled * unit).mean(-1, keepdim=True)) * rstd


norm.gradients(x=_norm_x, weight=lambda grad, x, mean, rstd: grad * (x - mean) * rstd)


@opsmith.operator("transforms::several")
def several(xs: list[Tensor], b: Tensor | None = None, *, power: int = 2) -> tuple[Tensor, Tensor]:
    total = sum((x**power for x in xs), torch.zeros_like(xs[0]))
    return (total.clone() if b is None else total * b), total.sum(-1)


def _several_xs(
    grad_result0: Tensor, grad_result1: Tensor, xs: list[Tensor], b: Tensor | None, power: int
) -> list[Tensor]:
    grad = (grad_result0 if b is None else grad_result0 * b) + grad_result1.unsqueeze(-1)
    return [grad * power * x ** (power - 1) for x in xs]


several.gradients(xs=_several_xs, b=lambda grad_result0, xs, power: grad_result0 * sum(x**power for x in xs))


@opsmith.operator("transforms::numpy_sin", opaque=True)
def numpy_sin(x: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(np.sin(x.numpy())))


@opsmith.operator("transforms::numpy_cos", opaque=True)
def numpy_cos(x: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(np.cos(x.numpy())))


numpy_sin.fake(torch.empty_like)
numpy_cos.fake(torch.empty_like)
numpy_sin.gradients(x=lambda grad, x: grad * numpy_cos(x))
numpy_cos.gradients(x=lambda grad, x: -grad * numpy_sin(x))


@opsmith.operator("transforms::decay", mutates=["state"])
def decay(state: Tensor, x: Tensor) -> None:
    state.mul_(x.tanh()).add_(x)


decay.gradients(
    state=lambda grad_state, x: grad_state * x.tanh(),
    x=lambda grad_state, state, x: grad_state * (1 + state * (1 - x.tanh() ** 2)),
)


@opsmith.operator("transforms::turn_", mutates=["x"], returns="x")
def turn_(x: Tensor, angle: Tensor) -> Tensor:
    first, second = x.clone()
    a, b = first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()
    return x.copy_(torch.stack([a, b]))


@turn_.kernel("cpu")
def _(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x[0] * angle.cos() - x[1] * angle.sin(), x[1] * angle.cos() + x[0] * angle.sin()
    x[0] = a
    x[1] = b
    return x


@opsmith.operator("transforms::collect", mutates=["totals"])
def collect(totals: list[Tensor], x: Tensor) -> Tensor:
    totals[0].add_(x.sin())
    totals[1].mul_(x)
    return totals[0] * totals[1]


def _on_copies(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """A function that writes into its first argument as one of tensors alone, that writes into a copy."""

    def functional(first: Tensor, second: Tensor) -> Tensor:
        first = first.clone()
        function(first, second)
        return first

    return functional


def _collected(first: Tensor, second: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    totals = [first.clone(), second.clone()]
    result = collect(totals, x)
    return (result, *totals)


def _plainly_collected(first: Tensor, second: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    totals = [first.clone(), second.clone()]
    result = collect.reference(totals, x)
    return (result, *totals)


def _functionally_collected(first: Tensor, second: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    totals, result = collect.functional([first, second], x)
    return (result, *totals)


def _plain_involution(x: Tensor, w: Tensor) -> Tensor:
    """By im2col, which torch can batch; the gradient of `Tensor.unfold`, in our reference, it can not."""
    (B, C, H, W), (G, K) = x.shape, w.shape[1:3]
    windows = torch.nn.functional.unfold(x, K, padding=1).view(B, G, C // G, K, K, H, W)
    return (windows * w.unsqueeze(2)).sum((3, 4)).view(B, C, H, W)


def _plain_involution_weight_gradient(g: Tensor, x: Tensor) -> Tensor:
    B, C, H, W = x.shape
    windows = torch.nn.functional.unfold(x, 3, padding=1).view(B, C, 3, 3, H, W)
    return (windows * g.view(B, C, 1, 1, H, W)).sum(1, keepdim=True)


_ops = opsmith.ops
DECLARED = [
    Subject(
        "formulas", lambda x, w: gate(x, w, 1.5), lambda x, w: gate.reference(x, w, 1.5), ((2, 3), (2, 3))
    ),
    Subject("broadcast", gate, gate.reference, ((2, 3), (3,))),
    Subject("part-derived", partly, partly.reference, ((3,), (3,))),
    Subject("no-formula", derived, derived.reference, ((3,), (3,))),
    Subject("kernel-no-formula", with_kernel, with_kernel.reference, ((3,), (3,))),
    Subject("joint", joint, joint.reference, ((3,), (3,))),
    Subject("hidden", norm, lambda x, w: norm.reference(x, w)[0], ((2, 3), (3,))),
    Subject(
        "list-and-two-results",
        lambda a, b, c: several([a, b], c, power=3),
        lambda a, b, c: several.reference([a, b], c, power=3),
        ((2, 3), (2, 3), (2, 3)),
    ),
    Subject("in-place", _on_copies(decay), _on_copies(decay.reference), ((2, 3), (2, 3)), writes=True),
    Subject("in-place-functional", decay.functional, _on_copies(decay.reference), ((2, 3), (2, 3))),
    Subject("in-place-kernel", _on_copies(turn_), _on_copies(turn_.reference), ((2, 3), (3,)), writes=True),
    Subject("in-place-kernel-functional", turn_.functional, _on_copies(turn_.reference), ((2, 3), (3,))),
    Subject("in-place-list", _collected, _plainly_collected, ((3,), (3,), (3,)), writes=True),
    Subject(
        "in-place-list-functional",
        _functionally_collected,
        _plainly_collected,
        ((3,), (3,), (3,)),
        writes=True,
    ),
    Subject("opaque", numpy_sin, torch.sin, ((3,),)),
    Subject("ops.exp", _ops.exp, torch.exp, ((2, 3),)),
    Subject("ops.mul", _ops.mul, torch.mul, ((2, 3), (3,))),
    Subject("ops.add", _ops.add, torch.add, ((2, 3), (3,))),
    Subject("ops.linear", _ops.linear, torch.nn.functional.linear, ((4, 3), (2, 3), (2,))),
    Subject(
        "ops.involution",
        lambda x, w: _ops.involution(x, w, padding=1),
        _plain_involution,
        ((1, 2, 2, 2), (1, 1, 3, 3, 2, 2)),
    ),
    Subject(
        "ops.involution_input_gradient",
        lambda g, w: involution_input_gradient(g, w, (2, 2), padding=1),
        lambda g, w: involution_input_gradient.reference(g, w, (2, 2), padding=1),
        ((1, 2, 2, 2), (1, 1, 3, 3, 2, 2)),
    ),
    Subject(
        "ops.involution_weight_gradient",
        lambda g, x: involution_weight_gradient(g, x, 1, (3, 3), padding=1),
        _plain_involution_weight_gradient,
        ((1, 2, 2, 2), (1, 2, 2, 2)),
    ),
]
