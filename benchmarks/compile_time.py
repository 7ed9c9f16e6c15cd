"""Compile time of an operator without a kernel beside the same function without an operator, in turns.

Each round compiles both from nothing (no cache of torch's) and calls them once: forward, and forward with
backward. The figure is processor time of the process. Beside it: graphs and kernels over four sizes.
Stated limit: 1.1 times the plain function, and as many graphs and kernels.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor
from torch._inductor import metrics
from torch._inductor.compile_fx import compile_fx

import opsmith


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return (scores - math.log2(len(scores))).softmax(-1) @ v


def gelu_gate(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.gelu(q) * torch.sigmoid(k) + v / float(v.shape[0])


def add(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q + k * v


FUNCTIONS = (attention, gelu_gate, add)
SIZES = ((4, 6, 8), (5, 7, 9), (6, 8, 10), (7, 9, 11))


def inputs(size: tuple[int, ...], *, requires_grad: bool) -> list[Tensor]:
    return [torch.randn(size).requires_grad_(requires_grad) for _ in range(3)]


def step(function: Callable[..., Tensor], given: list[Tensor]) -> None:
    result = function(*given)
    if result.requires_grad:
        result.sum().backward()


def compiled(
    function: Callable[..., Tensor], dynamic: bool | None, graphs: list[Any]
) -> Callable[..., Tensor]:
    def backend(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        return compile_fx(graph, examples)

    return torch.compile(
        lambda *given: function(*given) * 2, fullgraph=True, dynamic=dynamic, backend=backend
    )


def compile_seconds(function: Callable[..., Tensor], dynamic: bool | None, *, requires_grad: bool) -> float:
    torch.compiler.reset()
    gc.collect()
    start = time.process_time()
    step(compiled(function, dynamic, []), inputs(SIZES[0], requires_grad=requires_grad))
    return time.process_time() - start


def graphs_and_kernels(function: Callable[..., Tensor], dynamic: bool | None) -> tuple[int, int]:
    torch.compiler.reset()
    metrics.reset()
    graphs: list[Any] = []
    run = compiled(function, dynamic, graphs)
    for size in SIZES:
        step(run, inputs(size, requires_grad=True))
    return len(graphs), metrics.generated_kernel_count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch._inductor.config.force_disable_caches = True
    warnings.filterwarnings("ignore", "dynamo_pgo force disabled")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {rounds} rounds, processor seconds")
    print(f"{'':34s}{'plain':>9s}{'opsmith':>9s}{'ratio':>7s}   graphs, kernels over {len(SIZES)} sizes")
    for function in FUNCTIONS:
        ours = opsmith.operator(f"compile_time::{function.__name__}")(function)
        for dynamic in (False, True):
            for requires_grad in (False, True):
                ways = (function, ours)
                for way in ways:
                    compile_seconds(way, dynamic, requires_grad=requires_grad)
                taken = [
                    [compile_seconds(way, dynamic, requires_grad=requires_grad) for way in ways]
                    for _ in range(rounds)
                ]
                plain, own = (statistics.median(column) for column in zip(*taken, strict=True))
                ratio = statistics.median(b / a for a, b in taken)
                counted = [graphs_and_kernels(way, dynamic) for way in ways] if requires_grad else ""
                name = f"{function.__name__}, {'dynamic' if dynamic else 'static'}"
                name += ", with backward" if requires_grad else ""
                print(f"{name:34s}{plain:9.2f}{own:9.2f}{ratio:7.2f}   {counted}", flush=True)


if __name__ == "__main__":
    main()
