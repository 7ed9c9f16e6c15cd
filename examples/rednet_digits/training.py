"""The training itself: a network, what improves it, and the random numbers; one epoch after the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from data import Images, batches, digits
from options import Configuration
from processes import Processes
from torch import Tensor

from opsmith.ops.rednet import RedNet

WEIGHT_DECAY, SMOOTHING = 0.05, 0.1

Record = dict[str, float]
"""Figures of an epoch: `epoch`, `training_loss`, `held_out_loss` (nats), `accuracy`, `learning_rate`."""


class DivergedError(Exception):
    """The loss is not finite, and no step will make it finite again."""


class Training:
    """A run in progress, the same on every process.

    All processes draw the same random numbers and make the same batches, of which each takes its own part:
    together they see in every step what one process alone would.
    """

    def __init__(
        self, configuration: Configuration, device: torch.device, processes: Processes | None = None
    ) -> None:
        self.device, self.processes = device, processes or Processes()
        self.batch, self.epochs = configuration.batch, configuration.epochs
        training, self.held_out = digits(configuration.seed)
        self.images = training[slice(configuration.images)]
        torch.manual_seed(configuration.seed)
        self.generator = torch.Generator().manual_seed(configuration.seed)
        self.network = RedNet((1, 1), classes=10, in_channels=1, width=32, small=True).to(device)
        self.replica = self.processes.replicated(self.network)
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=configuration.lr, weight_decay=WEIGHT_DECAY
        )
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, configuration.lr, total_steps=self.epochs * self.steps
        )
        self.history: list[Record] = []

    @property
    def steps(self) -> int:
        """Number of steps of an epoch."""
        return len(self.images) // self.batch

    def epoch(self, advance: Callable[[], None] = lambda: None) -> Record:
        """Train for an epoch, test, and add to the history what came of it; each step calls `advance`.

        Raises:
            DivergedError: On every process, if the loss of training or test is not finite.
        """
        self.network.train()
        loss, rate = 0.0, self.schedule.get_last_lr()[0]
        for batch in batches(self.images, self.batch, self.generator):
            loss += self.step(batch)
            advance()
        (training_loss,) = self.processes.total(loss / self.steps / self.processes.count)
        self.processes.agree(self.network)
        held_out_loss, accuracy = self.test()
        if not (math.isfinite(training_loss) and math.isfinite(held_out_loss)):
            raise DivergedError(
                f"epoch {len(self.history) + 1}: the loss is {training_loss} in training and {held_out_loss} "
                "on held-out images; choose a smaller --lr"
            )
        record = {
            "epoch": len(self.history) + 1,
            "training_loss": training_loss,
            "held_out_loss": held_out_loss,
            "accuracy": accuracy,
            "learning_rate": rate,
        }
        self.history.append(record)
        return record

    def step(self, batch: Images) -> float:
        """One step of the optimizer on this process's part of a batch, and its mean loss there."""
        loss = self.loss(self.processes.share(batch))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.item()

    def loss(self, images: Images) -> Tensor:
        """Mean cross-entropy with smoothed labels; the backward averages its gradients over all processes."""
        images = images.to(self.device)
        return F.cross_entropy(self.replica(images.pixels), images.labels, label_smoothing=SMOOTHING)

    @torch.no_grad()
    def test(self) -> tuple[float, float]:
        """Mean loss and accuracy on the held-out images, each of which one process looks at."""
        self.network.eval()
        images = self.processes.share(self.held_out).to(self.device)
        logits = self.network(images.pixels)
        loss = F.cross_entropy(logits, images.labels, label_smoothing=SMOOTHING, reduction="sum")
        right = (logits.argmax(1) == images.labels).sum()
        loss_of_all, right_of_all = self.processes.total(loss.item(), right.item())
        return loss_of_all / len(self.held_out), right_of_all / len(self.held_out)

    def is_best(self) -> bool:
        """Return True if no epoch before the last was as accurate."""
        accuracies = [record["accuracy"] for record in self.history]
        return accuracies[-1] > max(accuracies[:-1], default=-1.0)

    def state_dict(self) -> dict[str, Any]:
        """All that changes from step to step."""
        return {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "generator": self.generator.get_state(),
            "random_numbers": torch.get_rng_state(),
            "history": self.history,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.generator.set_state(state["generator"])
        torch.set_rng_state(state["random_numbers"])
        self.history = state["history"]
