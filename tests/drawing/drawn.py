"""Subjects of the tests of drawing: the example of row E1, an operator of each kind, a network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import opsmith


def row_e1() -> tuple[Tensor, dict[str, Tensor]]:
    """`add(b, sum(mul(w, x)))`, and its tensors."""
    w = torch.tensor([[2.0, 3.0]], requires_grad=True)
    b = torch.tensor([3.0], requires_grad=True)
    x = torch.tensor([[4.0, 5.0]])
    return opsmith.ops.add(b, opsmith.ops.mul(w, x).sum()), {"w": w, "b": b, "x": x}


@opsmith.operator("drawn::plain")
def plain(x: Tensor) -> Tensor:
    return (x * 2).sin() + 1


plain.samples(lambda make: [(make(3),)])


@opsmith.operator("drawn::joint", hidden=("rstd",))
def joint(x: Tensor, weight: Tensor, power: int = 1) -> tuple[Tensor, Tensor]:
    rstd = x.var(-1, keepdim=True).rsqrt()
    return x * rstd * weight**power, rstd


@joint.gradients
def _(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> dict[str, Any]:
    return {"x": grad * weight * rstd, "weight": (grad * x * rstd).sum(0)}


joint.samples(lambda make: [(make(4, 3), make(3))])


@opsmith.operator("drawn::derived")
def derived(x: Tensor, y: Tensor) -> Tensor:
    return x * y


derived.gradients(y=opsmith.zero)
derived.samples(lambda make: [(make(3), make(3))])


@opsmith.operator("drawn::opaque", opaque=True)
def opaque(x: Tensor) -> Tensor:
    return torch.tensor(x.tolist()) * 2


opaque.fake(torch.empty_like)
opaque.gradients(x=lambda grad: grad * 2)
opaque.samples(lambda make: [(make(3),)])


@opsmith.operator("drawn::several")
def several(xs: list[Tensor], factor: float = 2.0) -> tuple[Tensor, Tensor]:
    return xs[0] + xs[1], xs[0] * factor


several.gradients(
    xs=lambda grad_result0, grad_result1, factor: [grad_result0 + grad_result1 * factor, grad_result0]
)
several.samples(lambda make: [([make(2), make(2)],)])


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2 * ctx.saved_tensors[0]


square = opsmith.adopt(Square, "drawn::square")
square.samples(lambda make: [(make(3),)])


class Network(torch.nn.Module):
    """Two blocks of one activation each, which is called twice in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Sequential(opsmith.ops.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU())
        self.last = torch.nn.Linear(8, 2)
        self.activation = torch.nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.activation(self.last(self.first(x)))
        return {"y": self.activation(plain(y)), "best": y.argmax(-1)}


def network() -> Network:
    torch.manual_seed(0)
    return Network()
