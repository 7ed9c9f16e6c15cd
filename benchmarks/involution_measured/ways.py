"""The ways to compute an involution that are compared, all of them functions of an image and a weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from opsmith.ops import involution

Way = Callable[[Tensor, Tensor], Tensor]
Call = Callable[[], object]


@dataclass(frozen=True)
class Setting:
    """One involution: the sizes of its image, of its kernels, and the step between them."""

    channels: int
    height: int
    width: int
    kernel: int = 7
    stride: int = 1
    channels_per_group: int = 16
    batch: int = 8
    channels_last: bool = False

    @property
    def result(self) -> tuple[int, int]:
        """Ho and Wo; the image is padded by half a kernel."""
        sides = (self.height, self.width)
        height, width = ((n + 2 * (self.kernel // 2) - self.kernel) // self.stride + 1 for n in sides)
        return height, width

    @property
    def groups(self) -> int:
        return self.channels // self.channels_per_group

    @property
    def multiply_adds(self) -> int:
        """Of the forward; each gradient has as many."""
        height, width = self.result
        return self.batch * self.channels * height * width * self.kernel**2

    @property
    def multiply_adds_inside(self) -> int:
        """Of the forward, without those of windows that lie outside of the image."""
        rows, columns = map(self._inside, (self.height, self.width), self.result)
        return self.batch * self.channels * rows * columns

    def _inside(self, side: int, places: int) -> int:
        """Pairs of a place and an offset in the kernel whose pixel there is, along one side."""
        starts = [place * self.stride - self.kernel // 2 for place in range(places)]
        return sum(min(side, start + self.kernel) - max(0, start) for start in starts)

    @property
    def windows(self) -> int:
        """Numbers that `unfold` copies."""
        return self.multiply_adds

    @property
    def numbers(self) -> tuple[int, int, int]:
        """Of the image, of the weight, and of the result."""
        pixels = self.result[0] * self.result[1]
        image = self.batch * self.channels * self.height * self.width
        weight = self.batch * self.groups * self.kernel**2 * pixels
        return image, weight, self.batch * self.channels * pixels

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Image, weight, and what comes back for the result."""
        generator = torch.Generator().manual_seed(0)
        sizes = (self.height, self.width)
        image = torch.randn(self.batch, self.channels, *sizes, generator=generator).to(dtype)
        shape = (self.batch, self.groups, self.kernel, self.kernel, *self.result)
        weight = torch.randn(shape, generator=generator).to(dtype)
        came = torch.randn(self.batch, self.channels, *self.result, generator=generator).to(dtype)
        if self.channels_last:
            image, came = (each.to(memory_format=torch.channels_last) for each in (image, came))
        return image.requires_grad_(), weight.requires_grad_(), came


def unfold_of(setting: Setting) -> Way:
    """By a copy of every window, as the paper's authors have it in PyTorch."""
    K, stride = setting.kernel, setting.stride

    def unfold(image: Tensor, weight: Tensor) -> Tensor:
        (B, C, *_), (_, G, _, _, Ho, Wo) = image.shape, weight.shape
        windows = F.unfold(image, K, 1, K // 2, stride).view(B, G, C // G, K * K, Ho, Wo)
        return (weight.view(B, G, 1, K * K, Ho, Wo) * windows).sum(3).view(B, C, Ho, Wo)

    return unfold


def ours_of(setting: Setting) -> Way:
    """`opsmith.ops.involution`."""
    return lambda image, weight: involution(image, weight, setting.stride, setting.kernel // 2)


def depthwise_of(setting: Setting, dtype: torch.dtype) -> Way:
    """A depthwise convolution of equal size, whose kernel is the same at every pixel: a yardstick."""
    K = setting.kernel
    same = torch.randn(setting.channels, 1, K, K).to(dtype)
    return lambda image, _weight: F.conv2d(image, same, None, setting.stride, K // 2, groups=setting.channels)


def forward_of(way: Way, image: Tensor, weight: Tensor) -> Call:
    """A call without gradients."""
    return torch.no_grad()(lambda: way(image, weight))


def both_of(way: Way, image: Tensor, weight: Tensor, came: Tensor) -> Call:
    """A call forward and backward, through autograd."""

    def run() -> None:
        image.grad = weight.grad = None
        way(image, weight).backward(came)

    return run


def hold(setting: Setting, way: Way, dtype: torch.dtype) -> None:
    """Nothing is timed that is wrong: results and gradients are held to those of `unfold` in float64."""
    found = values(way, setting.tensors(dtype))
    right = values(unfold_of(setting), tuple(each.detach().double() for each in setting.tensors(dtype)))
    for ours, expected in zip(found, right, strict=True):
        within = 50 * torch.finfo(dtype).eps * max(1.0, expected.abs().max().item())
        torch.testing.assert_close(ours.double(), expected, rtol=0, atol=within)


def values(way: Way, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The result and both gradients."""
    image, weight, came = tensors
    result = way(image.requires_grad_(), weight.requires_grad_())
    return (result.detach(), *torch.autograd.grad(result, (image, weight), came))
