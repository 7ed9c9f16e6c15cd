"""One of two processes that train the example: runs its command, and tells as JSON what is the same on both.

torchrun --nproc-per-node 2 rednet_digits_rank.py OPTIONS ...

With STOP_AFTER=N in the environment it ends after N epochs, as if it had been stopped from outside.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "rednet_digits"))

from data import Images, batches, digits
from options import Configuration, parse
from processes import Processes, connected, started
from progress import Voice
from train import run
from training import Record, Training


def same_everywhere(training: Training) -> bool:
    """Return whether parameters, running statistics and optimizer state are the same bits on every rank."""
    kept = [tensor for state in training.optimizer.state.values() for tensor in state.values()]
    for tensor in (*training.network.state_dict().values(), *kept):
        everywhere = [torch.empty_like(tensor) for _ in range(training.processes.count)]
        dist.all_gather(everywhere, tensor.detach())
        if not all(torch.equal(tensor, other) for other in everywhere):
            return False
    return True


def gradients(
    configuration: Configuration, processes: Processes, part: Images, training: bool
) -> list[Tensor]:
    """The gradients of a first step in float64, averaged over these processes."""
    first = Training(configuration, torch.device("cpu"))
    first.replica = processes.replicated(first.network.double().train(training))
    first.loss(part).backward()
    return [parameter.grad for parameter in first.network.parameters() if parameter.grad is not None]


def difference(configuration: Configuration, processes: Processes, training: bool) -> float:
    """Distance of the averaged gradient from that of one process with the whole batch.

    The largest difference of an element, as a part of the largest element.
    """
    images, _ = digits(configuration.seed)
    whole = next(batches(images, configuration.batch, torch.Generator().manual_seed(0)))
    whole = Images(whole.pixels.double(), whole.labels)
    together = gradients(configuration, processes, processes.share(whole), training)
    alone = gradients(configuration, Processes(), whole, training)
    largest = max(gradient.abs().max().item() for gradient in alone)
    return max((a - b).abs().max().item() for a, b in zip(together, alone, strict=True)) / largest


def stop_after(epochs: int) -> None:
    epoch = Training.epoch

    def stopping(self: Training, advance: Callable[[], None]) -> Record:
        if len(self.history) == epochs:
            sys.exit(0)
        return epoch(self, advance)

    Training.epoch = stopping  # type: ignore[method-assign]


def main() -> None:
    if "STOP_AFTER" in os.environ:
        stop_after(int(os.environ["STOP_AFTER"]))
    processes = started()
    options = parse(sys.argv[1:], processes)
    with connected(processes):
        training = run(options, processes, Voice(processes))
        told = {
            "same_everywhere": same_everywhere(training),
            "difference": {
                "evaluating": difference(options.configuration, processes, training=False),
                "training": difference(options.configuration, processes, training=True),
            },
        }
        if processes.rank == 0:
            sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
