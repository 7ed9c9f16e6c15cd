"""RedNet: a residual network whose 3x3 convolutions are involutions.

Source: D. Li et al., "Involution: Inverting the Inherence of Convolution for Visual Recognition", CVPR 2021,
arXiv:2103.06255, section 4.1 and table 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from torch import Tensor, nn

from opsmith.ops.involution import Involution2d
from opsmith.ops.involution.layer import is_count

BLOCKS = {
    26: (1, 2, 4, 1),
    38: (2, 3, 5, 2),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
"""Number of blocks in each stage, by the depth of the network."""

EXPANSION = 4
"""Ratio of a block's output channels to the channels of its involution."""


class Bottleneck(nn.Module):
    """Residual block: 1x1 convolution, involution, 1x1 convolution, added to the input.

    Args:
        channels: Number of channels of the input. width: Number of channels of the involution; the result has
            4 times as many.
        kernel_size: Kernel size of the involution.
        stride: Stride of the involution.
        channels_per_group: Number of channels that share a kernel.
    """

    def __init__(
        self, channels: int, width: int, *, kernel_size: int, stride: int, channels_per_group: int
    ) -> None:
        super().__init__()
        result = width * EXPANSION
        self.first = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.involution = nn.Sequential(
            Involution2d(width, kernel_size, stride, channels_per_group=channels_per_group),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        )
        self.last = nn.Sequential(nn.Conv2d(width, result, 1, bias=False), nn.BatchNorm2d(result))
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != result:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, result, 1, stride, bias=False), nn.BatchNorm2d(result)
            )
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, 4 width, ceil(H / stride), ceil(W / stride)]."""
        result: Tensor = self.activation(self.last(self.involution(self.first(x))) + self.shortcut(x))
        return result


class RedNet(nn.Module):
    """Network of residual blocks; each stage after the first halves the sides and doubles the channels.

    Args:
        blocks: Number of blocks in each stage, at least 1.
        classes: Number of logits.
        in_channels: Channels of the images.
        width: Channels of the first stage's involutions, a multiple of 8 and of `2 * channels_per_group`. The
            stem's involution has half as many channels, and a quarter of that number between its two
            convolutions.
        kernel_size: Kernel size of the involutions in the blocks; in the stem it is 3.
        channels_per_group: Number of channels that share a kernel.
        small: True for small images: the stem keeps their size, instead of dividing it by 4.

    Raises:
        ValueError: If the width is not such a multiple, the kernel size is even, or an argument is not a
            whole number of at least 1.

    Example:
        >>> import torch
        >>> network = RedNet((1, 1), classes=10, in_channels=1, width=32, small=True)
        >>> network(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        blocks: Sequence[int],
        *,
        classes: int = 1000,
        in_channels: int = 3,
        width: int = 64,
        kernel_size: int = 7,
        channels_per_group: int = 16,
        small: bool = False,
    ) -> None:
        super().__init__()
        blocks = _blocks(blocks)
        for name, number in {
            "classes": classes,
            "in_channels": in_channels,
            "width": width,
            "kernel_size": kernel_size,
            "channels_per_group": channels_per_group,
        }.items():
            _expect(is_count(number), name, "a whole number of at least 1", number)
        step = math.lcm(8, 2 * channels_per_group)
        if width % step:
            raise ValueError(
                f"expected the width of a RedNet to be a multiple of {step}, because channels_per_group is "
                f"{channels_per_group}, got {width}; choose a different width: `RedNet((1, 1), width={step})`"
            )
        self.stem = _stem(in_channels, width, channels_per_group, small)
        stages: list[nn.Module] = []
        channels = width
        for at, count in enumerate(blocks):
            made: list[nn.Module] = []
            for number in range(count):
                made.append(
                    Bottleneck(
                        channels,
                        width * 2**at,
                        kernel_size=kernel_size,
                        stride=2 if at and not number else 1,
                        channels_per_group=channels_per_group,
                    )
                )
                channels = width * 2**at * EXPANSION
            stages.append(nn.Sequential(*made))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, in_channels, H, W] to logits [B, classes]."""
        logits: Tensor = self.head(self.pool(self.stages(self.stem(images))).flatten(1))
        return logits


def rednet(depth: int = 50, *, classes: int = 1000, in_channels: int = 3) -> RedNet:
    """Make one of the networks of the paper, with random parameters.

    Args:
        depth: 26, 38, 50, 101 or 152.
        classes: Number of logits.
        in_channels: Channels of the images.

    Raises:
        ValueError: If there is no network of that depth, or an argument is not a whole number of at least 1.

    Example:
        >>> sum(parameter.numel() for parameter in rednet(26).parameters())
        9233166
    """
    if not is_count(depth) or depth not in BLOCKS:
        raise ValueError(
            f"expected the depth of a RedNet of the paper, {', '.join(map(str, BLOCKS))}, got {depth!r}; "
            "choose one of these, or give the blocks of each stage: `RedNet((1, 2, 4, 1))`"
        )
    return RedNet(BLOCKS[depth], classes=classes, in_channels=in_channels)


def _blocks(given: object) -> tuple[int, ...]:
    """Return the number of blocks of each stage; a stage without blocks would leave out its stride."""
    try:
        counts = iter(cast(Iterable[int], given))
    except TypeError:  # not an iterable
        counts = iter(())
    blocks = tuple(counts)
    holds = len(blocks) > 0 and all(is_count(count) for count in blocks)
    got = blocks if isinstance(given, Iterator) else given  # its repr would be an address
    _expect(holds, "blocks", "one or more whole numbers of at least 1, one for each stage", got)
    return blocks


def _expect(holds: bool, argument: str, expected: str, got: object) -> None:
    if not holds:
        raise ValueError(
            f"RedNet expects `{argument}` to be {expected}, got {got!r}; "
            "choose other numbers: `RedNet((1, 2, 4, 1), classes=1000, in_channels=3, width=64)`"
        )


def _stem(in_channels: int, width: int, channels_per_group: int, small: bool) -> nn.Sequential:
    """Return the stem: convolution, involution, convolution at half the sides, then a 3x3 max pool."""
    half = width // 2

    def convolved(before: int, after: int, stride: int) -> tuple[nn.Module, ...]:
        convolution = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        return convolution, nn.BatchNorm2d(after), nn.ReLU()

    layers = (
        *convolved(in_channels, half, 1 if small else 2),
        *(Involution2d(half, 3, channels_per_group=channels_per_group), nn.BatchNorm2d(half), nn.ReLU()),
        *convolved(half, width, 1),
    )
    return nn.Sequential(*layers) if small else nn.Sequential(*layers, nn.MaxPool2d(3, 2, 1))
