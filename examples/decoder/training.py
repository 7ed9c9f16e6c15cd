"""The training: pieces of text, the network, AdamW, and the learning rate of each step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from data import batch, pieces, python_documentation
from optimizer import AdamW
from torch import Tensor

from opsmith.ops.decoder import Decoder, DecoderSizes

CLIP, WARM_UP, LAST = 1.0, 0.05, 0.05
"""Largest norm of the gradients; part of the steps in which the rate rises; part of the rate at the end."""

TESTED = 64
"""Pieces of the held-out text in a test."""


class DivergedError(Exception):
    """The loss is not finite, and no step will make it finite again."""


@dataclass(frozen=True)
class Plan:
    """The numbers that determine a run."""

    steps: int
    batch: int
    lr: float
    seed: int
    sizes: DecoderSizes


class Training:
    """A run in progress."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        torch.manual_seed(plan.seed)
        self.generator = torch.Generator().manual_seed(plan.seed)
        self.network = Decoder(plan.sizes)
        self.optimizer = AdamW(self.network.parameters())
        text = python_documentation()
        self.text = text.training
        self.held_out = pieces(text.held_out, plan.sizes.positions)
        self.done = 0

    def rate(self) -> float:
        """The learning rate of the next step: it rises, and falls along a cosine."""
        part = (self.done + 1) / self.plan.steps
        if part < WARM_UP:
            return self.plan.lr * part / WARM_UP
        falling = 0.5 + 0.5 * math.cos(math.pi * (part - WARM_UP) / (1 - WARM_UP))
        return self.plan.lr * (LAST + (1 - LAST) * falling)

    def step(self) -> float:
        """Improve the network by one batch; returns its loss in bits per byte.

        Raises:
            DivergedError: If the loss is not finite.
        """
        tokens = batch(self.text, self.plan.batch, self.plan.sizes.positions, self.generator)
        loss = bits_per_byte(self.network, tokens)
        if not math.isfinite(loss.item()):
            raise DivergedError(f"step {self.done + 1}: the loss is {loss.item()}; choose a smaller --lr")
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), CLIP)
        self.optimizer.step(self.rate())
        self.done += 1
        return loss.item()

    @torch.no_grad()
    def test(self) -> float:
        """The loss on held-out text, in bits per byte."""
        chosen = self.held_out[:: max(1, len(self.held_out) // TESTED)]
        losses = [bits_per_byte(self.network, part).item() * len(part) for part in chosen.split(16)]
        return sum(losses) / len(chosen)


def bits_per_byte(network: Decoder, tokens: Tensor) -> Tensor:
    """The mean number of bits that each byte after the first costs the network, tokens [N, L + 1]."""
    logits = network(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / math.log(2)
