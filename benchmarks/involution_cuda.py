"""Involution on a GPU: opsmith's CUDA kernels beside a plain one, and beside `unfold` in PyTorch.

The four stages of RedNet-50, kernels of 7x7, 16 channels to a group, batches of 64. The plain kernel has a
thread for each number of its result, as the paper's authors' has: it is that of `examples/involution.cu`.
`copy` is how long the GPU takes to copy as many bytes as an operator has to read and write, each once; its
part of our time is how much of the bandwidth of a copy we reach. Times are medians of what the GPU needs;
before each call the L2 cache is written over. Run it with nothing else on the GPU:
`python benchmarks/involution_cuda.py [--rounds 30] [--dtypes float32 bfloat16] [--stages 64x56 ...]`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing_cuda import is_ours, milliseconds
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import involution_cuda as plain

from opsmith.ops.involution import (
    involution,
    involution_input_gradient,
    involution_weight_gradient,
)

STAGES = ("64x56", "128x28", "256x14", "512x7")
K, CHANNELS_PER_GROUP, PADDING = 7, 16, 3

Call = Callable[[], Tensor]


def unfold(x: Tensor, weight: Tensor) -> Tensor:
    """Involution by a copy of every window."""
    (B, C, H, W), G = x.shape, weight.shape[1]
    windows = F.unfold(x, K, 1, PADDING, 1).view(B, G, C // G, K * K, H, W)
    return (weight.view(B, G, 1, K * K, H, W) * windows).sum(3).view(B, C, H, W)


def held(found: Tensor, right: Tensor) -> None:
    """Nothing is timed that is wrong."""
    tolerance = 50 * torch.finfo(found.dtype).eps * right.abs().max().item()
    torch.testing.assert_close(found.double(), right.double(), rtol=0, atol=tolerance)


def ways(x: Tensor, weight: Tensor, grad: Tensor) -> dict[str, dict[str, Call]]:
    """For each operator the ways to compute it."""
    (H, W), G, steps = x.shape[2:], weight.shape[1], (1, PADDING)
    ours = {
        "forward": (involution, (x, weight, *steps)),
        "input gradient": (involution_input_gradient, (grad, weight, (H, W), *steps)),
        "weight gradient": (involution_weight_gradient, (grad, x, G, (K, K), *steps)),
    }
    theirs = {
        "forward": (plain.involution, (x, weight, *steps)),
        "input gradient": (plain.grad_x, (grad, weight, H, W, *steps)),
        "weight gradient": (plain.grad_weight, (grad, x, G, K, *steps)),
    }
    for operator, arguments in (*ours.values(), *theirs.values()):
        is_ours(operator, *arguments)
    leaves = [each.detach().requires_grad_() for each in (x, weight)]
    result = unfold(*leaves)
    by_unfold: dict[str, Call] = {
        "forward": lambda: unfold(x, weight),
        "input gradient": lambda: torch.autograd.grad(result, leaves[0], grad, retain_graph=True)[0],
        "weight gradient": lambda: torch.autograd.grad(result, leaves[1], grad, retain_graph=True)[0],
    }

    def of(pair: tuple[Any, tuple[Any, ...]]) -> Call:
        return lambda: pair[0](*pair[1])  # type: ignore[no-any-return]

    return {
        name: {"ours": of(ours[name]), "plain": of(theirs[name]), "unfold": by_unfold[name]} for name in ours
    }


def measure(batch: int, C: int, side: int, dtype: torch.dtype, rounds: int) -> None:
    """Measure one stage, and print its rows of the table."""
    G = C // CHANNELS_PER_GROUP
    x = torch.randn(batch, C, side, side, device="cuda").to(dtype)
    weight = torch.randn(batch, G, K, K, side, side, device="cuda").to(dtype)
    grad = torch.randn_like(x)
    scratch = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    moved = (2 * x.numel() + weight.numel()) * x.element_size()  # the same for all three
    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = milliseconds(lambda: target.copy_(source), rounds, scratch)
    for name, calls in ways(x, weight, grad).items():
        right = calls["unfold"]()
        held(calls["ours"](), right)
        held(calls["plain"](), right)
        del right
        taken = {way: milliseconds(call, rounds, scratch) for way, call in calls.items()}
        ours = taken["ours"]
        print(
            f"{C:4} {side:2}x{side:<2} {str(dtype)[6:]:9} {name:16}"
            f"{ours:9.3f}{taken['plain']:9.3f}{taken['unfold']:9.3f}{copy:9.3f}"
            f"{taken['plain'] / ours:9.1f}x{taken['unfold'] / ours:8.1f}x{copy / ours:9.0%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--stages", nargs="+", default=STAGES)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/involution_cuda.py measures a GPU, and torch sees none here")
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, batches of {options.batch}; milliseconds"
    )
    print(f"{'stage':10} {'dtype':9} {'':16}{'ours':>9}{'plain':>9}{'unfold':>9}{'copy':>9}", end="")
    print(f"{'to plain':>10}{'unfold':>9}{'of copy':>9}")
    for dtype in options.dtypes:
        for stage in options.stages:
            measure(options.batch, *map(int, stage.split("x")), getattr(torch, dtype), options.rounds)


if __name__ == "__main__":
    main()
