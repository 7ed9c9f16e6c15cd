"""Involution: kernels in C++ beside the ways to compute it that there are without them.

The four stages of RedNet-50, kernels of 7x7, 16 channels to a group, in turns in one run: `unfold` in PyTorch
as the paper's authors have it, the same under torch.compile with one thread and with two, a depthwise
convolution of equal size as a yardstick, and `opsmith.ops.involution`. `floor` is how long the
machine takes to copy as many bytes as have to be read and written. Run it with nothing else running:
`python benchmarks/involution.py [--rounds 15] [--stages 64x56 ...] [--dtype float32]`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from opsmith.ops import involution

STAGES = ("64x56", "128x28", "256x14", "512x7")
BATCH, K, CHANNELS_PER_GROUP = 8, 7, 16

Call = Callable[[], object]


def unfold(x: Tensor, weight: Tensor) -> Tensor:
    """Involution by a copy of every window."""
    (B, C, H, W), G = x.shape, weight.shape[1]
    windows = F.unfold(x, K, 1, K // 2, 1).view(B, G, C // G, K * K, H, W)
    return (weight.view(B, G, 1, K * K, H, W) * windows).sum(3).view(B, C, H, W)


def both(function: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, grad: Tensor) -> Call:
    """A call forward and backward, through autograd."""

    def run() -> object:
        x.grad = weight.grad = None
        function(x, weight).backward(grad)
        return x.grad

    return run


def in_turns(calls: Mapping[str, tuple[Call, int]], rounds: int) -> dict[str, tuple[float, float]]:
    """Milliseconds of each, least and median; each with its number of threads."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        for name, (call, threads) in calls.items():
            torch.set_num_threads(threads)
            time.sleep(0.02)
            call()
            start = time.perf_counter()
            call()
            if number >= 2:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: (min(taken), statistics.median(taken)) for name, taken in times.items()}


def copied(size: int) -> float:
    """Milliseconds that the machine takes to copy half of so many bytes: as many are read and written."""
    torch.set_num_threads(2)
    source = torch.ones(max(1, size // 8))
    target = torch.empty_like(source)
    taken = []
    for _ in range(20):
        start = time.perf_counter()
        target.copy_(source)
        taken.append(time.perf_counter() - start)
    return min(taken) * 1e3


def measure(C: int, H: int, dtype: torch.dtype, rounds: int) -> None:
    """Measure one stage, and print a table."""
    torch._dynamo.reset()
    G = C // CHANNELS_PER_GROUP
    x, weight = torch.randn(BATCH, C, H, H).to(dtype), torch.randn(BATCH, G, K, K, H, H).to(dtype)
    grad, depthwise = torch.randn_like(x), torch.randn(C, 1, K, K).to(dtype)
    for each in (x, weight):
        each.requires_grad_()
    compiled = torch.compile(unfold, dynamic=False)

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        result: Tensor = involution(x, weight, 1, K // 2)
        return result

    def without(call: Call) -> Call:
        return torch.no_grad()(call)

    held(ours(x, weight), unfold(x.double(), weight.double()), dtype)
    ways = {"unfold": unfold, "unfold, compiled": compiled, "kernels": ours}
    forward: dict[str, tuple[Call, int]] = {}
    around: dict[str, tuple[Call, int]] = {}
    for name, way in ways.items():
        for threads in (1, 2):
            forward[f"{name}, {threads}"] = (without(lambda way=way: way(x, weight)), threads)  # type: ignore[misc]
            around[f"{name}, {threads}"] = (both(way, x, weight, grad), threads)
    forward["depthwise convolution, 2"] = (
        without(lambda: F.conv2d(x, depthwise, padding=K // 2, groups=C)),
        2,
    )
    floor = copied((x.numel() * 2 + weight.numel()) * x.element_size())
    for title, calls in (("forward", forward), ("forward and backward", around)):
        found = in_turns(calls, rounds)
        best = min(found["unfold, compiled, 1"][0], found["unfold, compiled, 2"][0])
        print(f"{C} channels, {H}x{H}, {str(dtype)[6:]}, {title}; floor of forward {floor:.2f} ms")
        for name, (least, median) in found.items():
            one = found["unfold, compiled, 1"][0] / least
            print(
                f"  {name:28}{least:9.3f}{median:9.3f} ms   {best / least:6.1f}x   of one thread {one:6.1f}x"
            )


def held(result: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Nothing is timed that is wrong."""
    tolerance = 50 * torch.finfo(dtype).eps * expected.abs().max().item()
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=tolerance)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--stages", nargs="+", default=STAGES)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    for stage in options.stages:
        C, H = map(int, stage.split("x"))
        measure(C, H, dtype, options.rounds)


if __name__ == "__main__":
    main()
