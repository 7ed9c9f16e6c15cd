"""The processes that train together: one, or as many as `torchrun` started."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from data import Images
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Processes:
    """This process's rank, and how many there are.

    Example:
        >>> Processes(rank=1, count=2).share(Images(torch.zeros(4, 1, 8, 8), torch.arange(4))).labels
        tensor([1, 3])
    """

    rank: int = 0
    count: int = 1

    def share(self, images: Images) -> Images:
        """This process's part of some images: each is in the part of one process."""
        return images[slice(self.rank, None, self.count)]

    def total(self, *numbers: float) -> list[float]:
        """The sum of each number over all processes."""
        values = torch.tensor(numbers, dtype=torch.float64)
        if self.count > 1:
            dist.all_reduce(values)
        return values.tolist()

    def replicated(self, network: nn.Module) -> nn.Module:
        """The network, whose gradients are averaged over all processes in the backward."""
        if self.count == 1:
            return network
        # torch warns of gradients of 1x1 convolutions that name the same memory by other strides.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides", UserWarning)
        return DistributedDataParallel(network)

    def agree(self, network: nn.Module) -> None:
        """Take rank 0's running statistics, which DDP shares only before a forward, not after it."""
        if self.count > 1:
            for buffer in network.buffers():
                dist.broadcast(buffer, src=0)


def started() -> Processes:
    """Ranks that `torchrun` sets in the environment; without it, one process."""
    return Processes(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


@contextmanager
def connected(processes: Processes) -> Iterator[None]:
    """A region in which the processes can talk to one another, by gloo."""
    if processes.count == 1:
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()
