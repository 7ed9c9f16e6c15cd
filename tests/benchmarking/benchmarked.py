"""Operators that the tests of benchmarks share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import opsmith


@opsmith.operator("benchmarked::gate", shapes="x: B M, y: B M -> B M")
def gate(x: Tensor, y: Tensor) -> Tensor:
    return x * torch.tanh(y)


gate.gradients(x=lambda grad, y: grad * y.tanh(), y=lambda grad, x, y: grad * x * (1 - y.tanh() ** 2))
gate.samples(lambda make: [(make(3, 4), make(3, 4))])


@opsmith.operator("benchmarked::windows", shapes="x: B N, weight: K -> B N-K+1")
def windows(x: Tensor, weight: Tensor, times: int = 1) -> Tensor:
    return (x.unfold(1, weight.shape[0], 1) * weight).sum(-1) * times


@windows.samples
def _(make: opsmith.Make) -> Iterator[Any]:
    yield make(2, 9), make(3), 2


@opsmith.operator("benchmarked::unshaped")
def unshaped(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.mT


unshaped.samples(lambda make: [(make(4, 3), make(2, 3))])


@opsmith.operator("benchmarked::wrong")
def wrong(x: Tensor) -> Tensor:
    return x * x


wrong.gradients(x=lambda grad, x: -2 * grad * x)
wrong.samples(lambda make: [(make(3),)])


@opsmith.operator("benchmarked::bare")
def bare(x: Tensor) -> Tensor:
    return x * 2


@opsmith.operator("benchmarked::native", shapes="x: N -> N")
def native(x: Tensor) -> Tensor:
    return x.exp() + 1


native.gradients(x=lambda grad, result: grad * (result - 1))
native.kernel("cpu", lambda x: torch.exp(x).add_(1))
native.samples(lambda make: [(make(5),)])


@opsmith.operator("benchmarked::seldom", shapes="x: N -> N")
def seldom(x: Tensor) -> Tensor:
    return x + 1


seldom.kernel("cpu", lambda x: x + 1 if x.numel() < 100 else x + 2)  # right at its samples alone
seldom.samples(lambda make: [(make(5),)])


@opsmith.operator("benchmarked::ranks", results={"values": ..., "order": opsmith.non_differentiable})
def ranks(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sort().values * 2, x.argsort()


ranks.samples(lambda make: [(make(6),)])


@opsmith.operator("benchmarked::count")
def count(x: Tensor) -> Tensor:
    return (x > 0).sum()


count.samples(lambda make: [(make(6),)])


@opsmith.operator("benchmarked::scaled", hidden=("scale",))
def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax()
    return x / scale, scale


scaled.samples(lambda make: [(make(6),)])
