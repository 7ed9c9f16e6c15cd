"""Layer that calls involution, and computes the kernels from its input."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from opsmith.ops.involution.operators import involution

CHANNELS_PER_GROUP = 16


class Involution2d(nn.Module):
    """Weight the neighbourhood of each pixel by kernels that two 1x1 convolutions compute at that pixel.

    Kernels = span(ReLU(norm(reduce(x)))), where x is averaged over windows of the stride. If the stride does
    not divide a side of the image, the last window is smaller.

    Source: arXiv:2103.06255, section 3 and algorithm 1.

    Args:
        channels: C, channels of the input and of the result.
        kernel_size: Kh = Kw = K, odd; the image is padded by K // 2 zeros.
        stride: Stride in both dimensions.
        groups: G, number of kernels per pixel; C/G channels share a kernel. Alternatively give
            `channels_per_group`.
        channels_per_group: C/G, by default 16. reduction: Ratio of C to the number of channels between the
            two convolutions.
        device: Device of the parameters.
        dtype: Type of the parameters.

    Raises:
        ValueError: If a number is invalid, or the groups or the reduction do not divide C.

    Example:
        >>> import torch
        >>> layer = Involution2d(32, kernel_size=7, stride=2)
        >>> layer(torch.zeros(1, 32, 9, 8)).shape
        torch.Size([1, 32, 5, 4])
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int = 7,
        stride: int = 1,
        *,
        groups: int | None = None,
        channels_per_group: int | None = None,
        reduction: int = 4,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        numbers: dict[str, Any] = {"channels": channels, "stride": stride, "reduction": reduction}
        numbers["kernel_size"] = kernel_size
        for name, number in numbers.items():
            _expect(is_count(number), name, "a whole number of at least 1", repr(number))
        _expect(
            kernel_size % 2 == 1, "kernel_size", "an odd number, because a kernel needs a middle", kernel_size
        )
        _expect(channels % reduction == 0, "reduction", f"a divisor of channels={channels}", reduction)
        self.channels, self.kernel_size, self.stride = channels, kernel_size, stride
        self.groups = _groups(channels, groups, channels_per_group)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        # There is no padding. But with `count_include_pad`, Inductor divides the gradient of the last mean
        # by the size of a whole window (pytorch/pytorch#198119).
        means = nn.AvgPool2d(stride, ceil_mode=True, count_include_pad=False)
        self.pool = means if stride > 1 else nn.Identity()
        self.reduce = nn.Conv2d(channels, channels // reduction, 1, bias=False, **made)
        self.norm = nn.BatchNorm2d(channels // reduction, **made)
        self.activation = nn.ReLU()
        self.span = nn.Conv2d(channels // reduction, self.groups * kernel_size**2, 1, **made)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, C, ceil(H / stride), ceil(W / stride)]."""
        kernels = self.span(self.activation(self.norm(self.reduce(self.pool(x)))))
        weight = kernels.unflatten(1, (self.groups, self.kernel_size, self.kernel_size))
        return involution(x, weight, self.stride, self.kernel_size // 2)

    def extra_repr(self) -> str:
        """Return the arguments of the constructor."""
        return f"{self.channels}, kernel_size={self.kernel_size}, stride={self.stride}, groups={self.groups}"


def is_count(number: object) -> bool:
    """Return True for an int of at least 1; a bool is not a count."""
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def _groups(channels: int, groups: int | None, channels_per_group: int | None) -> int:
    """Return G, from the argument that was given."""
    if groups is not None and channels_per_group is not None:
        _expect(False, "groups", "None if `channels_per_group` is given", "both")
    name = "groups" if groups is not None else "channels_per_group"
    given = groups if groups is not None else channels_per_group
    number: Any = CHANNELS_PER_GROUP if given is None else given
    fits = is_count(number) and channels % number == 0
    _expect(fits, name, f"a divisor of channels={channels}", repr(number))
    return int(number if groups is not None else channels // number)


def _expect(holds: bool, argument: str, expected: str, got: object) -> None:
    if not holds:
        raise ValueError(
            f"Involution2d expects `{argument}` to be {expected}, got {got}; "
            "choose other numbers: `Involution2d(64, kernel_size=7, stride=1, channels_per_group=16)`"
        )
