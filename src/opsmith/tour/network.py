"""A small network for 8x8 images, made of our own operators."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opsmith.ops import Involution2d, Linear
from opsmith.tour.swish import swish


class Pixelwise(nn.Module):
    """A linear map of each pixel's channels."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.linear = Linear(in_channels, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, D, H, W]."""
        return self.linear(x.movedim(1, -1)).movedim(-1, 1)


class Block(nn.Module):
    """Involution, then a linear map of each pixel, around which the input passes too."""

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

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.lift = Pixelwise(1, channels)
        self.position = nn.Parameter(torch.randn(channels, 8, 8) * 0.1)
        self.norm = nn.BatchNorm2d(channels)
        self.blocks = nn.Sequential(Block(channels), Block(channels, stride=2), Block(channels))
        self.head = Linear(channels * 16, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, 1, 8, 8] to logits [B, 10]."""
        x = swish(self.norm(self.lift(images) + self.position))
        return self.head(self.blocks(x).flatten(1))
