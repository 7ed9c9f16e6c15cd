"""RedNet-50 as a whole, and its layer `Involution2d`: ours beside compiled `unfold`, and beside ResNet-50.

Seconds of a training step (forward, backward, SGD) and of inference, in turns in one run, and the memory that
each takes at most beyond its parameters, in a process of its own. The same network with `unfold` has each
involution compiled by itself. ResNet-50 has the same blocks with convolutions of 3x3, and its own stem.
Run it with nothing else running: `python benchmarks/rednet.py [--rounds 5] [--batch 8] [--no-memory]`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config

sys.path.insert(0, str(Path(__file__).parent))

from involution_measured.turns import in_turns
from involution_measured.ways import Setting, Way, unfold_of

from opsmith.benchmarking.cost import resident_growth
from opsmith.ops import Involution2d
from opsmith.ops.rednet import Bottleneck, RedNet, rednet

THREADS = 2
SIDE, CLASSES = 224, 1000
STAGES = ((64, 56), (128, 28), (256, 14), (512, 7))
NETWORKS = ("ours", "unfold, compiled", "ResNet-50")
Call = Callable[[], object]


class UnfoldInvolution2d(Involution2d):
    """The layer with compiled `unfold` in place of the operator."""

    compiled: Way

    def forward(self, x: Tensor) -> Tensor:
        kernels = self.span(self.activation(self.norm(self.reduce(self.pool(x)))))
        weight = kernels.unflatten(1, (self.groups, self.kernel_size, self.kernel_size))
        return self.compiled(x, weight)


def with_unfold(network: nn.Module) -> nn.Module:
    """Give each involution of a network compiled `unfold`; layers that are alike share one."""
    compiled: dict[tuple[int, int], Way] = {}
    for layer in network.modules():
        if type(layer) is Involution2d:
            key = layer.kernel_size, layer.stride
            if key not in compiled:
                setting = Setting(layer.channels, 0, 0, kernel=layer.kernel_size, stride=layer.stride)
                compiled[key] = torch.compile(unfold_of(setting), dynamic=False)
            layer.__class__ = UnfoldInvolution2d
            object.__setattr__(layer, "compiled", compiled[key])
    return network


def resnet50() -> nn.Module:
    """Make ResNet-50: the blocks of RedNet-50 with convolutions, behind a 7x7 convolution and a max pool.

    Source: K. He et al., "Deep Residual Learning for Image Recognition", arXiv:1512.03385, table 1.
    """
    network = rednet(50, classes=CLASSES)
    for block in network.modules():
        if isinstance(block, Bottleneck):
            old = block.involution[0]
            assert isinstance(old, Involution2d)
            block.involution[0] = nn.Conv2d(old.channels, old.channels, 3, old.stride, 1, bias=False)
    first = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
    network.stem = nn.Sequential(first, nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    return network


def made(name: str) -> nn.Module:
    """Make one of the networks, with the same random numbers."""
    torch.manual_seed(0)
    if name == "ResNet-50":
        return resnet50()
    network: RedNet = rednet(50, classes=CLASSES)
    return with_unfold(network) if name == "unfold, compiled" else network


def training(network: nn.Module, images: Tensor) -> Call:
    """Make a call of one training step."""
    labels = torch.arange(images.shape[0]) % CLASSES
    optimizer = torch.optim.SGD(network.parameters(), 0.01, momentum=0.9)

    def step() -> None:
        network.train()
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()

    return step


def inference(network: nn.Module, images: Tensor) -> Call:
    """Make a call without gradients."""

    @torch.no_grad()
    def run() -> Tensor:
        network.eval()
        logits: Tensor = network(images)
        return logits

    return run


KINDS = {"training": training, "inference": inference}


def expect_same(ours: nn.Module, other: nn.Module, images: Tensor) -> None:
    """Nothing is timed that is wrong: both compute the same logits."""
    logits = [inference(network, images[:1])() for network in (ours, other)]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-3)


def layers_in_turns(batch: int, rounds: int) -> None:
    """Print milliseconds of `Involution2d` for each stage."""
    for channels, side in STAGES:
        torch._dynamo.reset()
        images = torch.randn(batch, channels, side, side, requires_grad=True)
        ways = {
            "ours": Involution2d(channels),
            "unfold, compiled": with_unfold(nn.Sequential(Involution2d(channels))),
        }
        calls: dict[str, tuple[Call, int]] = {}
        for name, layer in ways.items():

            def both(layer: nn.Module = layer, images: Tensor = images) -> None:
                layer.train()
                layer(images).sum().backward()

            calls[f"{name}, forward"] = inference(layer, images.detach()), THREADS
            calls[f"{name}, forward and backward"] = both, THREADS
        found = in_turns(calls, rounds)
        print(f"\nInvolution2d({channels}), {batch} images of {side}x{side}, {THREADS} threads")
        for title in ("forward", "forward and backward"):
            ours, other = found[f"ours, {title}"].least, found[f"unfold, compiled, {title}"].least
            print(f"  {title:22}{ours:9.2f} ms, compiled unfold {other:9.2f} ms: {other / ours:.1f}x")


def memory_of(name: str, kind: str, batch: int) -> int:
    """Return the bytes that a call holds at most, measured in a process of its own."""
    command = [sys.executable, __file__, "--memory-of", name, kind, "--batch", str(batch)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    dynamo_config.recompile_limit = 64  # a network has more sizes than compiled code is kept for
    images = torch.randn(options.batch, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    if options.memory_of:
        name, kind = options.memory_of
        call = KINDS[kind](made(name), images)
        call()  # compiles, and makes gradients and the optimizer's state
        print(resident_growth(call))
        return
    layers_in_turns(options.batch, options.rounds)
    torch._dynamo.reset()
    networks = {name: made(name) for name in NETWORKS}
    expect_same(networks["ours"], networks["unfold, compiled"], images)
    for kind, call_of in KINDS.items():
        calls = {name: (call_of(network, images), THREADS) for name, network in networks.items()}
        found = in_turns(calls, options.rounds)
        print(f"\nRedNet-50, {kind}, {options.batch} images of {SIDE}x{SIDE}, {THREADS} threads")
        for name, times in found.items():
            least, median = times.least / 1e3, times.median / 1e3
            line = f"  {name:18}{least:8.3f} s, median {median:8.3f}; "
            line += f"{times.least / found['ours'].least:5.2f} of ours"
            if not options.no_memory:
                line += f"; {memory_of(name, kind, options.batch) / 1e6:7.0f} MB"
            print(line)


if __name__ == "__main__":
    main()
