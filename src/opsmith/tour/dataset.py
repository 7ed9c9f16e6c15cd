"""Handwritten digits: 1,797 images of 8x8 pixels, which scikit-learn brings along.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI repository, 1998.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SHIFTED = 0.3
"""Which part of the training images is shifted by up to one pixel."""


@dataclass(frozen=True)
class Images:
    """Images and what they show.

    Args:
        pixels: [N, 1, 8, 8] in [0, 1], float32.
        labels: [N], int64.
    """

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> Images:
        """The same on a device."""
        return Images(self.pixels.to(device), self.labels.to(device))

    def batches(self, size: int, generator: torch.Generator) -> Iterator[Images]:
        """All images in random order and in full batches, some of them shifted."""
        order = torch.randperm(len(self), generator=generator).split(size)
        for chosen in order:
            if len(chosen) == size:
                yield Images(_shifted(self.pixels[chosen], generator), self.labels[chosen])


def digits(seed: int) -> tuple[Images, Images]:
    """Training images, and a held-out fifth with as many of each digit in proportion."""
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


def _shifted(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Images [B, 1, 8, 8], some of them shifted by -1, 0 or 1 pixel in each direction."""
    count, size = len(pixels), pixels.shape[-1]
    moves = torch.rand(count, 1, generator=generator) < SHIFTED
    offsets = 1 + moves * torch.randint(-1, 2, (count, 2), generator=generator)
    rows, columns = (offsets[:, i, None] + torch.arange(size) for i in (0, 1))
    padded = F.pad(pixels.squeeze(1), (1, 1, 1, 1))
    image = torch.arange(count)[:, None, None]
    return padded[image, rows[:, :, None], columns[:, None, :]].unsqueeze(1)
