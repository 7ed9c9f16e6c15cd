"""Plot of involution's times over the batch, the image, the channels and the threads.

Ours and `unfold` under torch.compile, forward and backward together, and a depthwise convolution, forward
alone; float32. It writes `out/involution-scaling.svg` and `.png`, and prints the figures.
Run it with nothing else running: `python benchmarks/involution_scaling.py [--rounds 5]`; it needs matplotlib.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from involution_measured.turns import in_turns
from involution_measured.ways import Call, Setting, both_of, depthwise_of, forward_of, ours_of, unfold_of

BASE = Setting(128, 28, 28)
DTYPE = torch.float32
CORES = os.cpu_count() or 1
ALONG: Mapping[str, Mapping[int, tuple[Setting, int]]] = {
    "images in a batch": {n: (replace(BASE, batch=n), CORES) for n in (1, 2, 4, 8, 16, 32)},
    "pixels of a side": {n: (replace(BASE, height=n, width=n), CORES) for n in (7, 14, 28, 56)},
    "channels": {n: (replace(BASE, channels=n), CORES) for n in (16, 32, 64, 128, 256, 512)},
    "threads": {n: (BASE, n) for n in sorted({1, 2, CORES // 2, CORES} - {0})},
}
LINES = {  # colours of Okabe and Ito, which colour-blind readers can tell apart
    "ours": ("#0072B2", "o"),
    "unfold, compiled": ("#D55E00", "s"),
    "depthwise convolution, forward": ("#009E73", "^"),
}


def measure(setting: Setting, threads: int, rounds: int) -> dict[str, float]:
    """Milliseconds of each way."""
    torch._dynamo.reset()
    image, weight, came = setting.tensors(DTYPE)
    compiled = torch.compile(unfold_of(setting), dynamic=False)
    calls: dict[str, tuple[Call, int]] = {
        "ours": (both_of(ours_of(setting), image, weight, came), threads),
        "unfold, compiled": (both_of(compiled, image, weight, came), threads),
        "depthwise convolution, forward": (
            forward_of(depthwise_of(setting, DTYPE), image, weight),
            threads,
        ),
    }
    return {name: times.least for name, times in in_turns(calls, rounds).items()}


def draw(found: Mapping[str, Mapping[int, Mapping[str, float]]], out: Path) -> None:
    """One panel for each thing that grows."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(found), figsize=(4 * len(found), 3.6), sharey=True)
    for panel, (what, points) in zip(axes, found.items(), strict=True):
        for name, (colour, marker) in LINES.items():
            panel.plot(
                list(points),
                [each[name] for each in points.values()],
                marker,
                color=colour,
                ls="-",
                label=name,
            )
        panel.set(xlabel=what, xscale="log", yscale="log", xticks=list(points), xticklabels=list(points))
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("milliseconds, forward and backward")
    axes[0].legend(fontsize=8)
    figure.suptitle("Involution 7x7, 16 channels a group; else 8 images of 28x28 with 128 channels")
    figure.tight_layout()
    for kind in ("svg", "png"):
        figure.savefig(out / f"involution-scaling.{kind}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for what, settings in ALONG.items():
        print(f"{what:20}{'ours':>10}{'compiled':>12}{'depthwise':>12}   ms")
        found[what] = {}
        for number, (setting, threads) in settings.items():
            times = found[what][number] = measure(setting, threads, options.rounds)
            print(f"{number:20}" + "".join(f"{times[name]:11.3f}" for name in LINES), flush=True)
    draw(found, options.out)
    print(f"wrote {options.out / 'involution-scaling.svg'} and .png")


if __name__ == "__main__":
    main()
