"""The handwritten digits of scikit-learn: 1,797 images of 8x8 pixels, a fifth of them held out.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI repository, 1998.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SHIFTED = 0.6
"""Part of the training images that is shifted by up to one pixel."""


@dataclass(frozen=True)
class Images:
    """Pixels [N, 1, 8, 8] in [0, 1], float32, and the digits that they show [N], int64."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, chosen: slice | Tensor) -> Images:
        return Images(self.pixels[chosen], self.labels[chosen])

    def to(self, device: torch.device) -> Images:
        return Images(self.pixels.to(device), self.labels.to(device))


def digits(seed: int) -> tuple[Images, Images]:
    """Training images and held-out ones, with as many of each digit in proportion."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    loaded = load_digits()
    pixels = torch.from_numpy(loaded.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(loaded.target).long()
    parts = train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=seed)
    training, held_out = (Images(pixels[part], labels[part]) for part in parts)
    return training, held_out


def batches(images: Images, size: int, generator: torch.Generator) -> Iterator[Images]:
    """Full batches in random order, some of their images shifted; what no batch fills is left out."""
    order = torch.randperm(len(images), generator=generator)
    for start in range(0, len(images) - size + 1, size):
        batch = images[order[start : start + size]]
        yield Images(shifted(batch.pixels, generator), batch.labels)


def shifted(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Images [B, 1, H, W], some of them moved by -1, 0 or 1 pixel in each direction."""
    batch, _, height, width = pixels.shape
    places = F.pad(pixels, (1, 1, 1, 1)).unfold(2, height, 1).unfold(3, width, 1)  # [B, 1, 3, 3, H, W]
    moves = torch.randint(3, (2, batch), generator=generator)
    moves = torch.where(torch.rand(batch, generator=generator) < SHIFTED, moves, 1)
    return places[torch.arange(batch), :, moves[0], moves[1]]
