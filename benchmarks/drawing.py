"""Drawing: seconds to trace graphs and to lay them out as SVG; torchviz beside it where it is installed.

A chain and a random graph of 256 nodes, 1,000 nodes unfolded, and the training graph of RedNet-50 at 224 x
224, folded. The least and the median of several turns: `python benchmarks/drawing.py [--rounds 5]`.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.drawing import Options, encoded, trace
from opsmith.ops.rednet import rednet


def chain(length: int) -> Tensor:
    made = torch.rand(3, requires_grad=True) * 1
    for _ in range(length):
        made = made.sin()
    return made.sum()


def random_graph(size: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    made = [torch.rand(3, requires_grad=True) * 1]
    for _ in range(size):
        first, second = torch.randint(max(0, len(made) - 8), len(made), (2,), generator=generator)
        made.append(made[first] + made[second])
    return torch.stack(made).sum()


def seconds(run: Callable[[], Any], rounds: int) -> str:
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return f"{min(taken):7.3f} {statistics.median(taken):7.3f} s"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    network, image = rednet(50), torch.rand(1, 3, 224, 224)
    subjects: dict[str, tuple[Callable[[], Any], int | None]] = {
        "a chain of 256": (partial(trace, chain(253)), 0),
        "256 at random": (partial(trace, random_graph(254)), 0),
        "a chain of 1,000": (partial(trace, chain(1000)), 0),
        "RedNet-50, training": (
            partial(trace, network, Options(inputs=image, training=True)),
            None,
        ),
    }
    print(f"{'':22}{'nodes':>7}  {'traced, least and median':26}{'as SVG, least and median':26}")
    for name, (traced, depth) in subjects.items():
        graph = traced()
        as_svg = seconds(partial(encoded, graph, "svg", depth=depth), rounds)
        print(f"{name:22}{len(graph.nodes):7}  {seconds(traced, rounds):26}{as_svg:26}", flush=True)
    if importlib.util.find_spec("torchviz") is None:
        print("torchviz is not installed: no peer")
        return
    from torchviz import make_dot

    print("torchviz, without layout:", seconds(partial(make_dot, random_graph(254)), rounds))


if __name__ == "__main__":
    main()
