"""Involution in ONNX Runtime, by its body in the file and by its kernel in a library, beside PyTorch.

The four stages of RedNet-50 (kernels of 7x7, 16 channels to a group) as operators alone, and RedNet-26 as
a network; the export compares each file and library with PyTorch first. The ways take turns in each round,
in an order that moves on from round to round. ONNX Runtime's threads spin for a while after a run, waiting
for the next: each way starts after a pause, and once untimed. The library is measured without spinning as
well, since its threads of OpenMP share the cores with those.

Run it with nothing else running: `python benchmarks/onnx_native.py [--rounds 15] [--batch 8] [--threads 2]`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor

import opsmith
from opsmith.ops.rednet import rednet

STAGES = ("64x56", "128x28", "256x14", "512x7")
PAUSE_S = 0.05
PYTORCH, BODY, LIBRARY, QUIET = "PyTorch", "the body", "the library", "the library, no spinning"


def session(made: Any, *, native: bool, spinning: bool) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    if native:
        options.register_custom_ops_library(str(made.library))
    if not spinning:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(made.path), options, providers=["CPUExecutionProvider"])


def ways(model: Any, args: tuple[Any, ...], folder: Path) -> dict[str, Callable[[], Any]]:
    made = opsmith.export_onnx(model, args, folder / "model.onnx", library=folder / "ops.so")
    print(f"  the library computes {dict(made.native)}; off by {made.difference:.1e}")
    tensors = [each for each in args if isinstance(each, Tensor)]
    given = {name: tensor.numpy() for name, tensor in zip(made.inputs, tensors, strict=True)}

    def runs(*, native: bool, spinning: bool) -> Callable[[], Any]:
        made_session = session(made, native=native, spinning=spinning)
        return lambda: made_session.run(None, given)

    return {
        PYTORCH: lambda: model(*args),
        BODY: runs(native=False, spinning=True),
        LIBRARY: runs(native=True, spinning=True),
        QUIET: runs(native=True, spinning=False),
    }


def measured(of: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in of}
    names = list(of)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            time.sleep(PAUSE_S)
            of[name]()
            start = time.perf_counter()
            of[name]()
            taken[name].append(time.perf_counter() - start)
    return taken


def show(title: str, taken: dict[str, list[float]]) -> None:
    least = {name: min(seconds) * 1000 for name, seconds in taken.items()}
    print(f"{title}: least and median ms; the body's least as a multiple, and PyTorch's")
    for name, seconds in taken.items():
        print(
            f"  {name:26}{least[name]:9.3f}{statistics.median(seconds) * 1000:9.3f}"
            f"{least[BODY] / least[name]:8.2f}x{least[PYTORCH] / least[name]:8.2f}x"
        )


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--stages", nargs="*", default=STAGES)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"ONNX Runtime {onnxruntime.__version__}, torch {torch.__version__}, {options.threads} threads")
    for stage in options.stages:
        channels, side = map(int, stage.split("x"))
        images = torch.randn(options.batch, channels, side, side)
        weight = torch.randn(options.batch, channels // 16, 7, 7, side, side)
        with tempfile.TemporaryDirectory() as folder:
            of = ways(opsmith.ops.involution, (images, weight, 1, 3), Path(folder))
            show(f"involution {stage}, batch {options.batch}", measured(of, options.rounds))
    with tempfile.TemporaryDirectory() as folder:
        images = torch.randn(options.batch, 3, 224, 224)
        of = ways(rednet(26).eval(), (images,), Path(folder))
        show(f"RedNet-26 at 224x224, batch {options.batch}", measured(of, options.rounds))


if __name__ == "__main__":
    main()
