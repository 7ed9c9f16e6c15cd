"""Operators of every kind, and inputs for them whose sizes two ranks do not share evenly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import opsmith
from opsmith import config

kernel_runs: list[tuple[int, ...]] = []
"""Shapes that kernels were called with."""


@opsmith.operator("sharded::marked")
def marked(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, N], weight [N] -> [B, N]."""
    return x.sin() * weight


marked.gradients(
    x=lambda grad, x, weight: 3 * grad * x.cos() * weight, weight=lambda grad, x: 3 * grad * x.sin()
)


@opsmith.operator("sharded::underived")
def underived(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, N], weight [N] -> [B, N]: no formula at all."""
    return torch.softmax(x * weight, -1)


@opsmith.operator("sharded::half_derived")
def half_derived(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, N], weight [N] -> [B, N]: a formula for one input."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3) * weight


half_derived.gradients(
    weight=lambda grad, x: 3 * grad * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3)
)


@opsmith.operator("sharded::sized")
def sized(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, N], weight [N] -> [B, N]: sizes of the whole count, and tensors made from them."""
    rows = torch.arange(x.shape[0], dtype=x.dtype)
    return x * weight * x.shape[0] + rows[:, None]


sized.gradients(x=lambda grad, x, weight: grad * weight * torch.full_like(weight, x.shape[0]))


@opsmith.operator("sharded::making")
def making(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, N], weight [N] -> [B, N]: no formula, and a gradient that needs a tensor made inside."""
    return x * weight * torch.arange(x.shape[-1], dtype=x.dtype)


@opsmith.operator("sharded::layer_norm", hidden=("mean", "rstd"))
def layer_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, N], weight [N] -> [B, N], with mean [B, 1] and rstd [B, 1]."""
    mean = x.mean(-1, keepdim=True)
    rstd = ((x - mean).square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    return (x - mean) * rstd * weight, mean, rstd


@layer_norm.gradients("x")
def _(grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> dict[str, Tensor]:
    normal, scaled = (x - mean) * rstd, grad * weight
    inner = scaled - scaled.mean(-1, keepdim=True) - normal * (scaled * normal).mean(-1, keepdim=True)
    return {"x": rstd * inner}


layer_norm.gradients(weight=lambda grad, x, mean, rstd: grad * (x - mean) * rstd)


@opsmith.operator("sharded::blended")
def blended(parts: list[Tensor], shares: Tensor) -> Tensor:
    """parts K times [B, N], shares [K] -> [B, N]."""
    return (torch.stack(parts) * shares[:, None, None]).sum(0)


blended.gradients(parts=lambda grad, shares: [grad * shares[i] for i in range(len(shares))])


@opsmith.operator("sharded::scaled")
def scaled(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, N], weight [N] -> [B, 1]: a kernel, and a formula for one input."""
    return (x * weight).sum(-1, keepdim=True)


scaled.gradients(x=lambda grad, weight: 3 * grad * weight)


@scaled.kernel("cpu")
def _(x: Tensor, weight: Tensor) -> Tensor:
    kernel_runs.append(tuple(x.shape))
    return x.matmul(weight)[:, None]


@opsmith.operator("sharded::sized_kernel")
def sized_kernel(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, N], weight [N] -> [B, N]: a kernel that may not be given rows alone."""
    return x * weight / x.shape[0]


@sized_kernel.kernel("cpu")
def _(x: Tensor, weight: Tensor) -> Tensor:
    kernel_runs.append(tuple(x.shape))
    return x.div(x.shape[0]).mul_(weight)


@opsmith.operator("sharded::switched")
def switched(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, N], weight [N] -> [B, N]: a gradient that is zero, and one that a formula makes anew."""
    return x.sign() * weight.exp()


switched.gradients(x=opsmith.zero, weight=lambda grad, weight: torch.ones(weight.shape[0], dtype=grad.dtype))


@opsmith.operator("sharded::ordered", results={"values": ..., "places": opsmith.non_differentiable})
def ordered(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x [B, N], weight [N] -> [B, N], [B, N]: two results, one of them of integers."""
    values, places = (x * weight).sort(-1)
    return values.clone(), places


ordered.gradients(
    x=lambda grad_values, places, weight: (
        torch.empty_like(grad_values).scatter(-1, places, grad_values) * weight
    )
)


@opsmith.operator("sharded::polar", results=("radius", "angle"))
def polar(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """x [B, N], y [N] -> [B, N], [B, N]."""
    return torch.sqrt(x.square() + y.square()), torch.atan2(x, y)


polar.gradients(
    x=lambda grad_radius, grad_angle, x, y, radius: (grad_radius * x + grad_angle * y / radius) / radius
)


@opsmith.operator("sharded::routine", opaque=True)
def routine(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, N], weight [N] -> [B, N]: not made of torch operations."""
    return torch.from_numpy(x.detach().numpy() ** 3) * weight


routine.gradients(
    x=lambda grad, x, weight: 3 * grad * x.square() * weight, weight=lambda grad, x: grad * x**3
)


@opsmith.operator("sharded::normed")
def normed(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, N], weight [N] -> [B, N]: looks at a number."""
    top = x.detach().max().item()
    return x / top * (weight if weight.detach().sum() > 0 else -weight)


@opsmith.operator("sharded::positive")
def positive(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, N], weight [N] -> [P], as many as are positive: torch has no placements for it."""
    return (x * weight)[x > 0]


@opsmith.operator("sharded::listed")
def listed(x: Tensor, weight: Tensor) -> tuple[Tensor, list[Tensor]]:
    """x [B, N], weight [N] -> [B, N], 2 times [B, N]: a kernel that returns a list."""
    return x * weight, [x.sin() * weight, x + weight]


@listed.kernel("cpu")
def _(x: Tensor, weight: Tensor) -> tuple[Tensor, list[Tensor]]:
    kernel_runs.append(tuple(x.shape))
    return x.mul(weight), [x.sin().mul_(weight), x.add(weight)]


@dataclass(frozen=True)
class Subject:
    """An operator, and what it is called with.

    Args:
        operator: The operator.
        shapes: Shape of each tensor; a list of shapes is a list of tensors.
        others: Arguments after the tensors.
        sharded: Whether it takes tensors that are not replicated.
    """

    operator: opsmith.Operator[..., Any]
    shapes: tuple[Any, ...]
    others: tuple[Any, ...] = ()
    sharded: bool = True

    def tensors(self) -> list[Any]:
        """The tensors that it is called with, the same on every rank."""
        generator = torch.Generator().manual_seed(0)

        def make(shape: Any) -> Any:
            if isinstance(shape, list):
                return [make(each) for each in shape]
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        return [make(shape) for shape in self.shapes]


MATRIX = ((5, 3), (3,))
SUBJECTS = {
    "exp": Subject(opsmith.ops.exp, ((5, 3),)),
    "mul": Subject(opsmith.ops.mul, MATRIX),
    "add": Subject(opsmith.ops.add, MATRIX),
    "linear": Subject(opsmith.ops.linear, ((5, 3), (4, 3), (4,))),
    "linear-without-bias": Subject(opsmith.ops.linear, ((2, 5, 3), (4, 3)), (None,)),
    "involution": Subject(opsmith.ops.involution, ((3, 4, 3, 5), (3, 2, 3, 3, 3, 5)), (1, 1)),
    "marked": Subject(marked, MATRIX),
    "underived": Subject(underived, MATRIX),
    "half-derived": Subject(half_derived, MATRIX),
    "sized": Subject(sized, MATRIX),
    "making": Subject(making, MATRIX),
    "layer-norm": Subject(layer_norm, MATRIX),
    "blended": Subject(blended, ([(5, 3), (5, 3)], (2,))),
    "kernel": Subject(scaled, MATRIX),
    "sized-kernel": Subject(sized_kernel, MATRIX),
    "switched": Subject(switched, MATRIX),
    "polar": Subject(polar, MATRIX),
    "ordered": Subject(ordered, MATRIX),
    "number": Subject(normed, MATRIX),
    "mask": Subject(positive, MATRIX),
    "list": Subject(listed, MATRIX),
    "opaque": Subject(routine, MATRIX, sharded=False),
}


@torch.library.custom_op("sharded::theirs", mutates_args=())
def theirs(x: Tensor, weight: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy() * weight.detach().numpy())


@torch.library.custom_op("sharded::theirs_with_gradient", mutates_args=())
def theirs_with_gradient(x: Tensor, weight: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy() * weight.detach().numpy())


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return grad * weight, (grad * x).sum(0)


theirs_with_gradient.register_autograd(_gradients, setup_context=_keep)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """The reference of both."""
    return x * weight


if not config.conservative():  # adopting is refused then
    for name, operator in (("adopted", theirs), ("adopted-with-gradient", theirs_with_gradient)):
        SUBJECTS[name] = Subject(opsmith.adopt(operator, reference=product), MATRIX)
