"""Peak memory of a way to compute an involution: the bytes that a call holds at most, beyond those before it.

Each way has a process of its own, `python -m involution_measured.memory WAY both|forward C H DTYPE`, in which
it has run before: what it loads and compiles is no part of the figure.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from involution_measured.ways import Setting, both_of, forward_of, ours_of, unfold_of
from opsmith.benchmarking.cost import resident_growth

THREADS = 2


def peak(way: str, title: str, setting: Setting, dtype: torch.dtype) -> int:
    """The bytes, measured in a process of its own."""
    words = [way, title, str(setting.channels), str(setting.height), str(dtype).removeprefix("torch.")]
    command = [sys.executable, "-m", "involution_measured.memory", *words]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True, check=True
    )
    return int(done.stdout.split()[-1])


def main(way: str, title: str, channels: str, height: str, dtype_name: str) -> None:
    torch.set_num_threads(THREADS)
    dtype = getattr(torch, dtype_name)
    setting = Setting(int(channels), int(height), int(height))
    function = ours_of(setting) if way == "ours" else unfold_of(setting)
    if way == "compiled":
        function = torch.compile(function, dynamic=False)
    image, weight, came = setting.tensors(dtype)
    once = [each[:1].detach().clone() for each in (image, weight, came)] if way != "compiled" else None
    for tensors in [once, once] if once else [[image, weight, came]] * 2:
        first = [each.detach().clone().requires_grad_(at < 2) for at, each in enumerate(tensors)]
        (both_of(function, *first) if title == "both" else forward_of(function, *first[:2]))()
        del first
    call = both_of(function, image, weight, came) if title == "both" else forward_of(function, image, weight)
    print(resident_growth(call))


if __name__ == "__main__":
    main(*sys.argv[1:])
