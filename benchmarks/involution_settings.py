"""Involution beyond the stages of RedNet: other kernels, strides, widths, groups and layouts.

Ours with two threads, beside `unfold` under torch.compile with one thread and with two, whichever is faster;
forward, and forward and backward through autograd. Run it with nothing else running:
`python benchmarks/involution_settings.py [--rounds 7] [--dtype float32]`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from involution_measured.turns import in_turns
from involution_measured.ways import Setting, both_of, forward_of, hold, ours_of, unfold_of

SETTINGS = {
    "K = 3": Setting(64, 56, 56, kernel=3),
    "K = 5": Setting(64, 56, 56, kernel=5),
    "stride 2": Setting(64, 56, 56, stride=2),
    "K = 3, stride 2": Setting(128, 28, 28, kernel=3, stride=2),
    "K = 5, stride 2": Setting(128, 28, 28, kernel=5, stride=2),
    "odd width": Setting(128, 28, 37),
    "odd sizes": Setting(64, 53, 51, kernel=5),
    "8 channels a group": Setting(64, 28, 28, channels_per_group=8),
    "3 channels a group": Setting(48, 28, 28, channels_per_group=3),
    "channels-last": Setting(128, 28, 28, channels_last=True),
    "channels-last, stride 2": Setting(64, 56, 56, stride=2, channels_last=True),
}


def measure(name: str, setting: Setting, dtype: torch.dtype, rounds: int) -> None:
    """Print one row."""
    torch._dynamo.reset()
    hold(setting, ours_of(setting), dtype)
    image, weight, came = setting.tensors(dtype)
    compiled = torch.compile(unfold_of(setting), dynamic=False)
    shown = f"{name:24}"
    for call_of in (forward_of, lambda *given: both_of(*given, came)):
        theirs, ours = call_of(compiled, image, weight), call_of(ours_of(setting), image, weight)
        found = in_turns({"1": (theirs, 1), "2": (theirs, 2), "ours": (ours, 2)}, rounds)
        best = min(found["1"].least, found["2"].least)
        shown += f"{best:9.2f}{found['ours'].least:9.3f} ms{best / found['ours'].least:7.1f}x   "
    print(shown, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    print(
        f"{options.dtype}, batch 8, 7x7 kernels, 16 channels a group where nothing else is said; "
        "compiled and ours"
    )
    print(f"{'':24}{'forward':34}forward and backward")
    for name, setting in SETTINGS.items():
        measure(name, setting, dtype, options.rounds)


if __name__ == "__main__":
    main()
