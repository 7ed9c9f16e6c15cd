"""Modules around the operators, as a user writes them: they own parameters, and the operators compute."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opsmith.ops import involution, linear
from opsmith.tour.swish import swish


class Linear(nn.Module):
    """An affine map with weights and bias that start uniform in [-0.1, 0.1).

    Args:
        in_features: M, size of the last dimension of the input.
        out_features: N, size of the last dimension of the result.
        dtype: dtype of the parameters.
        device: Where they lie.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., M] to [..., N]."""
        return linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """The sizes."""
        out_features, in_features = self.weight.shape
        return f"{in_features}, {out_features}"


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
