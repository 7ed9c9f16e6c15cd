"""A call on DTensors, of an operator and of its reference, in turns: processor time of the thread.

One process alone is the world, so that nothing is sent: what is timed is the work of torch and of opsmith
for a call. The operator has nothing but its reference, a gradient formula, or a kernel too, which runs on
shards.
Stated limit: twice the reference on the same DTensors.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import opsmith


def mul(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def swish(x: Tensor, y: Tensor) -> Tensor:
    return x * torch.sigmoid(y * x)


def attach(name: str, reference: Callable[..., Tensor], formulas: Any, *, kernel: bool = False) -> Any:
    operator = opsmith.operator(f"dtensor::{name}")(reference)
    if formulas:
        operator.gradients("x", "y")(formulas)
    if kernel:
        operator.kernel("cpu")(lambda x, y: reference(x, y))
    return operator


def mul_gradients(grad: Tensor, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"x": grad * y, "y": grad * x}


def swish_gradients(grad: Tensor, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    gate = torch.sigmoid(y * x)
    slope = grad * x * gate * (1 - gate)
    return {"x": grad * gate + slope * y, "y": slope * x}


def measure(theirs: Callable[[], Any], ours: Callable[[], Any], rounds: int, calls: int) -> list[float]:
    """Least microseconds of theirs and ours, and the median ratio of ours to theirs."""
    for _ in range(calls):
        theirs()
        ours()
    taken = []
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(calls):
            theirs()
        middle = time.thread_time()
        for _ in range(calls):
            ours()
        taken.append((middle - start, time.thread_time() - middle))
    least = [min(column) / calls * 1e6 for column in zip(*taken, strict=True)]
    return [*least, statistics.median(b / a for a, b in taken)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--calls", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    tensors = [distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)]) for _ in range(2)]
    leaves = [each.detach().requires_grad_() for each in tensors]
    grad = torch.ones_like(tensors[0])
    print(f"torch {torch.__version__}, microseconds: the reference, the operator, and the ratio")
    print(f"{'':24s}{'no grad':>26s}{'with grad':>26s}{'forward and backward':>26s}")
    for reference, formulas in ((mul, mul_gradients), (swish, swish_gradients)):
        name = reference.__name__
        operators = {
            name: attach(name, reference, None),
            f"{name}, formula": attach(f"{name}_formula", reference, formulas),
            f"{name}, kernel": attach(f"{name}_kernel", reference, formulas, kernel=True),
        }
        for label, operator in operators.items():
            cells = []
            for run in (
                lambda f: f(*tensors),
                lambda f: f(*leaves),
                lambda f: torch.autograd.grad(f(*leaves), leaves, grad),
            ):
                theirs, ours = (lambda f=each, run=run: run(f) for each in (reference, operator))
                found = measure(theirs, ours, options.rounds, options.calls)
                cells.append("{:9.1f}{:9.1f}  x{:4.2f}".format(*found))
            print(f"{label:24s}" + "".join(f"{cell:>26s}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
