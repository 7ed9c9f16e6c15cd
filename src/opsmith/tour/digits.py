"""Stage: a network of our own operators learns to read handwritten digits."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.nn.functional as F
from rich.table import Table

from opsmith.tour.computed import involution_computed_by
from opsmith.tour.dataset import Images, digits
from opsmith.tour.files import write_json, write_weights
from opsmith.tour.network import DigitNetwork
from opsmith.tour.progress import progress
from opsmith.tour.stage import Context, StageResult
from opsmith.tour.threads import single_thread

BATCH, LEARNING_RATE, WEIGHT_DECAY, SMOOTHING = 64, 0.01, 0.05, 0.1
ACCURACY = 0.97


@dataclass(frozen=True)
class Epoch:
    """One pass over the training images."""

    number: int
    loss: float
    accuracy: float


def train(network: DigitNetwork, train: Images, test: Images, epochs: int, seed: int) -> Iterator[Epoch]:
    """Train a network with AdamW and one cycle of the learning rate; after each epoch, test it."""
    device = network.position.device
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    steps = epochs * (len(train) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    for number in range(1, epochs + 1):
        losses: list[float] = []
        network.train()
        for batch in train.batches(BATCH, generator):
            batch = batch.to(device)
            loss = F.cross_entropy(network(batch.pixels), batch.labels, label_smoothing=SMOOTHING)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        right = confusion(network, test).diagonal().sum().item()
        yield Epoch(number, sum(losses) / len(losses), right / len(test))


@torch.no_grad()
def confusion(network: DigitNetwork, images: Images) -> torch.Tensor:
    """How often each digit (row) was read as each digit (column), [10, 10]."""
    network.eval()
    images = images.to(network.position.device)
    read = network(images.pixels).argmax(1)
    counts: torch.Tensor = (images.labels * 10 + read).bincount(minlength=100)
    return counts.reshape(10, 10).cpu()


def computed_by(network: DigitNetwork, images: Images) -> dict[str, list[str]]:
    """What computes involution and its gradients in a step of training; the network stays as it was."""
    network = deepcopy(network).train()
    batch = images.to(network.position.device)
    return involution_computed_by(lambda: F.cross_entropy(network(batch.pixels), batch.labels).backward())


@single_thread()
def run(context: Context) -> StageResult:
    """Train, print which digits were confused and what computed, and write `digits.json` and `digits.pt`."""
    start = perf_counter()
    training, test = digits(context.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(context.seed)
        network = DigitNetwork().to(context.device)
    first = Images(training.pixels[:BATCH], training.labels[:BATCH])
    computed = computed_by(network, first)
    curve: list[Epoch] = []
    with progress(context.console, "reading digits", context.digits_epochs) as advance:
        for epoch in train(network, training, test, context.digits_epochs, context.seed):
            curve.append(epoch)
            advance(f"loss {epoch.loss:.3f}, accuracy {epoch.accuracy:.1%}")
    matrix = confusion(network, test)
    accuracy = matrix.diagonal().sum().item() / len(test)
    context.console.print(_table(matrix))
    for name, ways in computed.items():
        context.console.print(f"{name}: {', '.join(ways)}", markup=False, highlight=False, soft_wrap=True)
    details = {
        "epochs": context.digits_epochs,
        "training_images": len(training),
        "test_images": len(test),
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "computed_by": computed,
        "accuracy": accuracy,
        "required_accuracy": ACCURACY,
        "training_seconds": round(perf_counter() - start, 2),
    }
    drawn = {
        "epoch": [epoch.number for epoch in curve],
        "loss": [epoch.loss for epoch in curve],
        "accuracy": [epoch.accuracy for epoch in curve],
    }
    files = (
        write_json(
            context.out / "digits.json", {**details, "curve": drawn, "confusion_matrix": matrix.tolist()}
        ),
        write_weights(context.out / "digits.pt", network),
    )
    headline = f"{accuracy:.1%} of {len(test)} held-out images read right (required: {ACCURACY:.0%})"
    return StageResult(accuracy >= ACCURACY, headline, details, files)


def _table(matrix: torch.Tensor) -> Table:
    table = Table("digit", "read right", "read as")
    for digit, row in enumerate(matrix.tolist()):
        others = [f"{other} ({count})" for other, count in enumerate(row) if count and other != digit]
        table.add_row(str(digit), f"{row[digit]} of {sum(row)}", ", ".join(others))
    return table
