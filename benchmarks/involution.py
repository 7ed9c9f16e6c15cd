"""Involution: `opsmith.ops.involution` beside the ways to compute it that there are without its kernels.

The four stages of RedNet-50, kernels of 7x7, 16 channels to a group, in turns in one run: `unfold` in PyTorch
as the paper's authors have it, the same under torch.compile, a depthwise convolution of equal size as a
yardstick, and ours; forward, and forward and backward through autograd; and the memory that each takes.
`of the floor` is the time that the machine needs at least, divided by ours: the longer one of a copy of as
many bytes and of a plain loop of as many multiply-adds as lie inside of the image, in the same turns. Bars
are 60 % forward and 45 % with backward, on float32.
Run it with nothing else running: `python benchmarks/involution.py [--rounds 15] [--stages 64x56 ...]
[--dtypes float32 bfloat16] [--no-memory]`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from involution_measured import memory
from involution_measured.machine import floors
from involution_measured.turns import in_turns
from involution_measured.ways import (
    Call,
    Setting,
    both_of,
    depthwise_of,
    forward_of,
    hold,
    ours_of,
    unfold_of,
)

STAGES = ("64x56", "128x28", "256x14", "512x7")
THREADS = (1, 2)
TITLES = {"forward": "forward", "both": "forward and backward"}


def measure(setting: Setting, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Measure one stage, print a table for each title, and return how long ours takes with all threads."""
    torch._dynamo.reset()
    hold(setting, ours_of(setting), dtype)
    image, weight, came = setting.tensors(dtype)
    compiled = torch.compile(unfold_of(setting), dynamic=False)
    ways = {"unfold": unfold_of(setting), "unfold, compiled": compiled, "ours": ours_of(setting)}
    yardstick = depthwise_of(setting, dtype)
    ours: dict[str, float] = {}
    for title, words in TITLES.items():
        calls: dict[str, tuple[Call, int]] = {}
        for name, way in {**ways, "depthwise convolution": yardstick}.items():
            call = forward_of(way, image, weight)
            if title == "both":
                if way is yardstick:
                    continue  # it has another weight
                call = both_of(way, image, weight, came)
            calls.update({f"{name}, {threads}": (call, threads) for threads in THREADS})
        bounds = floors(setting, dtype, backward=title == "both", threads=THREADS[-1])
        calls.update({name: (call, THREADS[-1]) for name, call in bounds.items()})
        found = in_turns(calls, rounds)
        single = found["unfold, compiled, 1"].least
        best = min(single, found["unfold, compiled, 2"].least)
        bound = max(bounds, key=lambda name: found[name].least)
        print(f"\n{setting.channels} channels, {setting.height}x{setting.width}, {str(dtype)[6:]}, {words}")
        for name, times in found.items():
            if name in bounds:
                print(f"  {name:26}{times.least:9.3f}{times.median:9.3f} ms, 2 threads")
                continue
            against, of = (single, "with 1") if name.endswith(", 1") else (best, "whichever is faster")
            note = f"{against / times.least:7.1f}x the compiled one, {of}"
            if name == "ours, 2":
                note += f"; {found[bound].least / times.least:.0%} of the floor, {bound}"
            print(f"  {name:26}{times.least:9.3f}{times.median:9.3f} ms {note}")
        ours[title] = found["ours, 2"].least
    return ours


def measure_memory(setting: Setting, dtype: torch.dtype) -> None:
    """Print how much memory each way takes beyond what it returns."""
    image, weight, result = setting.numbers
    buffer = setting.windows * dtype.itemsize
    print(f"\n{setting.channels} channels, {setting.height}x{setting.width}, {str(dtype)[6:]}, memory beyond")
    print(f"  results and gradients; the windows that `unfold` copies are {buffer / 1e6:.1f} MB")
    for title, words in TITLES.items():
        returned = (result + (image + weight if title == "both" else 0)) * dtype.itemsize
        for way in ("unfold", "compiled", "ours"):
            extra = memory.peak(way, title, setting, dtype) - returned
            print(f"  {words:22}{way:10}{extra / 1e6:9.1f} MB, {extra / buffer:7.1%} of the windows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--stages", nargs="+", default=STAGES)
    parser.add_argument("--dtypes", nargs="+", default=("float32", "bfloat16"))
    parser.add_argument("--no-memory", action="store_true")
    options = parser.parse_args()
    settings = []
    for stage in options.stages:
        channels, side = map(int, stage.split("x"))
        settings.append(Setting(channels, side, side))
    ours: dict[tuple[str, str], dict[str, float]] = {}
    for name in options.dtypes:
        dtype = getattr(torch, name)
        for setting, stage in zip(settings, options.stages, strict=True):
            ours[name, stage] = measure(setting, dtype, options.rounds)
    if {"float32", "bfloat16"} <= {*options.dtypes}:
        print("\nours, 2 threads, bfloat16 beside float32:")
        for stage in options.stages:
            for title, words in TITLES.items():
                wide, narrow = ours["float32", stage][title], ours["bfloat16", stage][title]
                print(f"  {stage:8}{words:22}{narrow:8.3f} and {wide:8.3f} ms: {narrow / wide:.2f}")
    if not options.no_memory:
        for setting in settings:
            measure_memory(setting, torch.float32)


if __name__ == "__main__":
    main()
