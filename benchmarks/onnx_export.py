"""Cost of named nodes with bodies in an export: RedNet-26 by `opsmith.export_onnx`, beside
`torch.onnx.export` of the same network with involution in plain PyTorch layers, in turns in one run.

Run it with nothing else running: `python benchmarks/onnx_export.py [--rounds 3] [--cpu]`. With `--cpu`
it counts the processors' seconds that the process was given, which say something on a busy machine too.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import opsmith
from opsmith.ops.involution import layer
from opsmith.ops.rednet import rednet

IMAGES = torch.randn(2, 3, 224, 224)


def by_unfold(image: Tensor, weight: Tensor, stride: int, padding: int, dilation: int = 1) -> Tensor:
    """Involution by a copy of every window, as the paper's authors have it in PyTorch."""
    (B, C, *_), (_, G, K, _, Ho, Wo) = image.shape, weight.shape
    windows = F.unfold(image, K, dilation, padding, stride).view(B, G, C // G, K * K, Ho, Wo)
    return (weight.view(B, G, 1, K * K, Ho, Wo) * windows).sum(3).view(B, C, Ho, Wo)


class Plain(nn.Module):
    """A network whose layers of involution call `by_unfold`."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.of = of

    def forward(self, images: Tensor) -> Tensor:
        ours, layer.involution = layer.involution, by_unfold
        try:
            return self.of(images)
        finally:
            layer.involution = ours


def network(plain: bool) -> nn.Module:
    """RedNet-26, with our operator in its layers, or without."""
    made = rednet(26)
    return (Plain(made) if plain else made).eval()


def by_torch(model: nn.Module, path: Path) -> None:
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (IMAGES,), dynamo=True, opset_version=20, verbose=False).save(path)


def by_us(verify: bool) -> Callable[[nn.Module, Path], None]:
    def export(model: nn.Module, path: Path) -> None:
        opsmith.export_onnx(model, IMAGES, path, verify=verify)

    return export


WAYS: dict[str, tuple[nn.Module, Callable[[nn.Module, Path], None]]] = {
    "torch, plain layers": (network(plain=True), by_torch),
    "ours, with bodies": (network(plain=False), by_us(verify=False)),
    "ours, with bodies, compared with PyTorch": (network(plain=False), by_us(verify=True)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    rounds, clock = given.rounds, time.process_time if given.cpu else time.perf_counter
    taken: dict[str, list[float]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):  # the first imports what exports need
            for name, (model, export) in WAYS.items():
                start = clock()
                export(model, Path(folder) / "model.onnx")
                if number:
                    taken[name].append(clock() - start)
    theirs = min(taken["torch, plain layers"])
    what = "CPU seconds" if given.cpu else "seconds"
    print(f"RedNet-26 at 224x224; least and median {what}, and the least as a multiple of torch's")
    for name, seconds in taken.items():
        least = min(seconds)
        print(f"{name:42}{least:7.2f}{statistics.median(seconds):7.2f}{least / theirs:7.2f}x")


if __name__ == "__main__":
    main()
