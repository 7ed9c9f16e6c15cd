"""A module around an operator that is written by hand: its weight is no parameter, but computed."""

from __future__ import annotations

from torch import Tensor, nn

from opsmith.ops import involution
from opsmith.tour.swish import swish


class Involution(nn.Module):
    """Involution with kernels that two 1x1 convolutions generate from the input, pixel by pixel.

    Source: arXiv:2103.06255, section 3 and algorithm 1.

    Args:
        channels: C, of the input and the result.
        kernel_size: Kh = Kw; odd.
        stride: For both dimensions.
        group_channels: C/G, how many channels share a kernel.
        reduction: How many times fewer channels there are between the two convolutions.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int = 3,
        stride: int = 1,
        group_channels: int = 8,
        reduction: int = 2,
    ) -> None:
        super().__init__()
        self.kernel_size, self.stride, self.groups = kernel_size, stride, channels // group_channels
        self.pool = nn.AvgPool2d(stride) if stride > 1 else nn.Identity()
        self.reduce = nn.Conv2d(channels, channels // reduction, 1)
        self.norm = nn.BatchNorm2d(channels // reduction)
        self.span = nn.Conv2d(channels // reduction, self.groups * kernel_size**2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, C, H / stride, W / stride]."""
        kernels = self.span(swish(self.norm(self.reduce(self.pool(x)))))
        weight = kernels.unflatten(1, (self.groups, self.kernel_size, self.kernel_size))
        return involution(x, weight, self.stride, self.kernel_size // 2)
