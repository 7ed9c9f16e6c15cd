"""Numbers of DTensors in code without opsmith, before and after an operator of ours has met one, as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import opsmith

USES: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.item(),
    "bool": bool,
    "int": int,
    "float": float,
    "tolist": lambda x: x.tolist(),
    "index": lambda x: [1, 2, 3][x.long()],  # type: ignore[call-overload]
    "branch": lambda x: "positive" if x > 0 else "not positive",
    "item in grad": lambda x: (
        torch.func.grad(lambda y: y.sum() * y.detach().sum().item())(x).to_local().tolist()
    ),
    "item in vmap": lambda x: torch.func.vmap(lambda y: y.item())(x),
    "item of a leaf": lambda x: x.detach().requires_grad_().item(),
    "item in inference mode": lambda x: torch.inference_mode()(x.item)(),
    "operators of item": lambda x: operators_of(x.item),
}


def operators_of(function: Callable[[], Any]) -> list[str]:
    """The operators that a mode sees."""
    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(operator))
            return operator(*args, **(kwargs or {}))

    with Mode():
        function()
    return seen


def told(use: Callable[[Tensor], Any], x: Tensor) -> str:
    """The result of a use, or its error."""
    try:
        return repr(use(x))
    except Exception as error:
        return f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"


def table() -> dict[str, str]:
    found = {}
    for where, mesh in {"here": EVERYWHERE, "elsewhere": ELSEWHERE}.items():
        for placement in (Replicate(), Shard(0), Partial()):
            for size in (0, 1, 2):
                x = DTensor.from_local(torch.arange(5.0, 5 + size), mesh, [placement], run_check=False)
                for name, use in USES.items():
                    found[f"{name} of {size}, {placement}, {where}"] = told(use, x)
    return found


if __name__ == "__main__":
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    EVERYWHERE, ELSEWHERE = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0])
    before = table()

    @opsmith.operator("plain_numbers::halved")
    def halved(x: Tensor) -> Tensor:
        return x / 2 if x.detach().sum().item() else x

    for _ in range(3):
        halved(DTensor.from_local(torch.ones(2), EVERYWHERE, [Replicate()], run_check=False))
    json.dump([before, table()], sys.stdout)
