"""Modules that hold operators, under each wrapper that spreads training over ranks."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from sharded_subjects import marked, scaled
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from opsmith.ops import Exp, Linear


class Net(nn.Module):
    """Two operators: formulas marked by a factor, and a kernel."""

    def __init__(self, *, unused: bool = False) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.linspace(-1, 1, 3))
        self.second = nn.Parameter(torch.linspace(1, 2, 3))
        if unused:
            self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = scaled(marked(x, self.first), self.second)
        return result


def generated() -> nn.Module:
    """Modules that are generated from operators."""
    torch.manual_seed(1)
    return nn.Sequential(Linear(3, 4), Exp(), Linear(4, 3, bias=False))


WRAPPERS: dict[str, Callable[[Any], nn.Module]] = {
    "DDP": lambda mesh: DistributedDataParallel(Net()),
    "DDP, unused parameters": lambda mesh: DistributedDataParallel(
        Net(unused=True), find_unused_parameters=True
    ),
    "DDP, static graph": lambda mesh: DistributedDataParallel(Net(), static_graph=True),
    "FSDP2": lambda mesh: fully_shard(Net(), mesh=mesh),
    "FSDP2, bfloat16": lambda mesh: fully_shard(
        Net(), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    ),
    "DDP, generated modules": lambda mesh: DistributedDataParallel(generated()),
    "FSDP2, generated modules": lambda mesh: fully_shard(generated(), mesh=mesh),
}


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Gradients of the parameters after a second step on this part of a batch, whole."""
    for _ in range(2):
        model.zero_grad()
        model(x).square().mean().backward()
    found = [each.grad for each in model.parameters() if each.grad is not None]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in found]


def wrapped(mesh: Any, rank: int) -> dict[str, str]:
    """Faults by wrapper; empty where there are none."""
    batch = torch.linspace(-2, 2, 18).view(6, 3)
    expected, of_generated = gradients(Net(), batch), gradients(generated(), batch)
    found: dict[str, str] = {}
    for name, wrap in WRAPPERS.items():
        found[name] = ""
        try:
            tolerance = {"rtol": 8 * 2**-8, "atol": 8 * 2**-8} if "bfloat16" in name else {}
            right = of_generated if "generated" in name else expected
            assert_close(gradients(wrap(mesh), batch[3 * rank : 3 * rank + 3]), right, **tolerance)
        except Exception:
            found[name] = traceback.format_exc(limit=-4)
    return found
