"""Stage: a network of opsmith's operators learns to read handwritten digits.

The images, 1,797 of 8x8 pixels, are part of scikit-learn. Source: E. Alpaydin and C. Kaynak, "Optical
Recognition of Handwritten Digits", UCI repository, 1998.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from opsmith.checking.side_effects.global_settings import thread_count
from opsmith.ops import Involution2d, Linear
from opsmith.tour.operators import involution_implementations, swish
from opsmith.tour.stage import StageResult, TourContext, progress, write_json, write_weights

SHIFTED = 0.3
"""Fraction of the training images that are shifted by up to one pixel."""


@dataclass(frozen=True)
class Images:
    """Images with their labels.

    Args:
        pixels: [N, 1, 8, 8] in [0, 1], float32.
        labels: [N], int64.
    """

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> Images:
        """Copy to a device."""
        return Images(self.pixels.to(device), self.labels.to(device))

    def batches(self, size: int, generator: torch.Generator) -> Iterator[Images]:
        """Yield full batches of the images in random order, some of them shifted."""
        order = torch.randperm(len(self), generator=generator).split(size)
        for chosen in order:
            if len(chosen) == size:
                yield Images(_shift(self.pixels[chosen], generator), self.labels[chosen])


def split_digits(seed: int) -> tuple[Images, Images]:
    """Return the training images and a held-out fifth, stratified by digit."""
    # scikit-learn takes a second to import, and only this stage needs it.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    loaded = load_digits()
    parts = train_test_split(
        loaded.images, loaded.target, test_size=0.2, stratify=loaded.target, random_state=seed
    )
    train_pixels, test_pixels, train_labels, test_labels = map(torch.from_numpy, parts)
    return (
        Images(train_pixels.float().unsqueeze(1) / 16, train_labels.long()),
        Images(test_pixels.float().unsqueeze(1) / 16, test_labels.long()),
    )


def _shift(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Shift some images [B, 1, 8, 8] by -1, 0 or 1 pixel in each direction."""
    count, size = len(pixels), pixels.shape[-1]
    moves = torch.rand(count, 1, generator=generator) < SHIFTED
    offsets = 1 + moves * torch.randint(-1, 2, (count, 2), generator=generator)
    rows, columns = (offsets[:, i, None] + torch.arange(size) for i in (0, 1))
    padded = F.pad(pixels.squeeze(1), (1, 1, 1, 1))
    image = torch.arange(count)[:, None, None]
    return padded[image, rows[:, :, None], columns[:, None, :]].unsqueeze(1)


class Pixelwise(nn.Module):
    """A linear map of each pixel's channels."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.linear = Linear(in_channels, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, D, H, W]."""
        return self.linear(x.movedim(1, -1)).movedim(-1, 1)


class Block(nn.Module):
    """Involution, then a linear map of each pixel; the input is added to the result (a residual block)."""

    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        involution = Involution2d(channels, 3, stride, channels_per_group=8, reduction=2)
        self.involution = nn.Sequential(involution, nn.BatchNorm2d(channels))
        self.mix = nn.Sequential(Pixelwise(channels, channels), nn.BatchNorm2d(channels))
        self.shortcut = nn.AvgPool2d(stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, C, H / stride, W / stride]."""
        return swish(self.mix(swish(self.involution(x))) + self.shortcut(x))


class DigitNetwork(nn.Module):
    """Three blocks over 32 channels, then a linear map to ten classes; 14,326 parameters."""

    def __init__(self) -> None:
        super().__init__()
        channels = 32
        self.lift = Pixelwise(1, channels)
        self.position = nn.Parameter(torch.randn(channels, 8, 8) * 0.1)
        self.norm = nn.BatchNorm2d(channels)
        self.blocks = nn.Sequential(Block(channels), Block(channels, stride=2), Block(channels))
        self.head = Linear(channels * 16, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, 1, 8, 8] to logits [B, 10]."""
        x = swish(self.norm(self.lift(images) + self.position))
        return self.head(self.blocks(x).flatten(1))


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
        right = confusion_matrix(network, test).diagonal().sum().item()
        yield Epoch(number, sum(losses) / len(losses), right / len(test))


@torch.no_grad()
def confusion_matrix(network: DigitNetwork, images: Images) -> torch.Tensor:
    """Return the confusion matrix [10, 10]: entry (i, j) counts images of i that were read as j."""
    network.eval()
    images = images.to(network.position.device)
    read = network(images.pixels).argmax(1)
    counts: torch.Tensor = (images.labels * 10 + read).bincount(minlength=100)
    return counts.reshape(10, 10).cpu()


def training_implementations(network: DigitNetwork, images: Images) -> dict[str, list[str]]:
    """Return the implementations of involution and its gradients in a training step of a copy."""
    network = deepcopy(network).train()
    batch = images.to(network.position.device)
    return involution_implementations(lambda: F.cross_entropy(network(batch.pixels), batch.labels).backward())


@thread_count(1)
def run(context: TourContext) -> StageResult:
    """Train, print a confusion matrix and the implementations, and write `digits.json` and `digits.pt`."""
    start = perf_counter()
    training, test = split_digits(context.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(context.seed)
        network = DigitNetwork().to(context.device)
    first = Images(training.pixels[:BATCH], training.labels[:BATCH])
    computed = training_implementations(network, first)
    curve: list[Epoch] = []
    with progress(context.console, "reading digits", context.digits_epochs) as advance:
        for epoch in train(network, training, test, context.digits_epochs, context.seed):
            curve.append(epoch)
            advance(f"loss {epoch.loss:.3f}, accuracy {epoch.accuracy:.1%}")
    matrix = confusion_matrix(network, test)
    accuracy = matrix.diagonal().sum().item() / len(test)
    context.console.print(_table(matrix))
    for name, implementations in computed.items():
        context.console.print(
            f"{name}: {', '.join(implementations)}", markup=False, highlight=False, soft_wrap=True
        )
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
