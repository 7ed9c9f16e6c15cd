"""Calls of involution and of its two gradients, for tests of their CUDA kernels."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from opsmith.kernels.cuda.kernel import CudaKernel, cuda_kernels
from opsmith.ops.involution.operators import (
    involution,
    involution_input_gradient,
    involution_weight_gradient,
)

Pair = tuple[int, int]
OPERATORS = {
    "forward": involution,
    "input gradient": involution_input_gradient,
    "weight gradient": involution_weight_gradient,
}
KERNELS: dict[str, CudaKernel] = {
    name: cuda_kernels(operator.specification)[0]  # type: ignore[arg-type]
    for name, operator in OPERATORS.items()
}
UNITS = {torch.float64: 64.0, torch.float32: 32.0, torch.float16: 2.0, torch.bfloat16: 2.0}
"""Units in the last place of the largest element: 16 bits are rounded once, after sums in float32."""


@dataclass(frozen=True)
class Case:
    """The sizes of a call.

    Attributes:
        batch, groups, channels: B; G; channels of a group.
        size, kernel, stride, padding, dilation: H and W; and as in `involution`.
        last: Whether image and cotangent are channels-last.
        turned: Whether the kernels of a pixel lie together.
        offset: Elements that each tensor's storage has before it: its address is a multiple of no vector.
    """

    batch: int
    groups: int
    channels: int
    size: Pair
    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    last: bool = False
    turned: bool = False
    offset: int = 0

    @property
    def result(self) -> Pair:
        height, width = (
            (n + 2 * p - (d * (k - 1) + 1)) // s + 1
            for n, p, d, k, s in zip(
                self.size, self.padding, self.dilation, self.kernel, self.stride, strict=True
            )
        )
        return height, width

    def tensors(self, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        """Image, weight and cotangent, as they lie in this case."""
        generator = torch.Generator().manual_seed(0)
        C = self.groups * self.channels

        def numbers(*shape: int, order: str) -> Tensor:
            made = torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)
            places = ["bcxy".index(each) if len(shape) == 4 else "bguvij".index(each) for each in order]
            ordered = made.permute(places).contiguous()
            held = torch.empty(self.offset + ordered.numel(), dtype=dtype, device=device)
            held[self.offset :] = ordered.flatten()
            back = [places.index(at) for at in range(len(shape))]
            return held[self.offset :].view(ordered.shape).permute(back)

        image = "bxyc" if self.last else "bcxy"
        return (
            numbers(self.batch, C, *self.size, order=image),
            numbers(
                self.batch,
                self.groups,
                *self.kernel,
                *self.result,
                order="bijguv" if self.turned else "bguvij",
            ),
            numbers(self.batch, C, *self.result, order=image),
        )

    def calls(self, image: Tensor, weight: Tensor, cotangent: Tensor) -> dict[str, tuple[Any, ...]]:
        """The arguments of each operator."""
        steps = self.stride, self.padding, self.dilation
        return {
            "forward": (image, weight, *steps),
            "input gradient": (cotangent, weight, self.size, *steps),
            "weight gradient": (cotangent, image, self.groups, self.kernel, *steps),
        }


PLAIN = Case(2, 2, 16, (9, 12), (7, 7), padding=(3, 3))
"""As in RedNet, with several tiles; rows are whole vectors."""
STRIDED = Case(1, 2, 5, (10, 16), (3, 3), (2, 2), (1, 1))
UNEVEN = Case(2, 1, 20, (6, 11), (2, 3), (1, 2), (2, 1), (2, 1))
"""Rows are no vectors; the channels of a group are two pieces."""
BEYOND = Case(1, 2, 3, (4, 23), (1, 3), (2, 7), (0, 6), (1, 8))
"""Steps that no tile is for."""

STEPS: list[dict[str, Pair]] = [
    {"kernel": (7, 7), "padding": (3, 3)},
    {"kernel": (7, 7), "padding": (3, 3), "stride": (2, 2)},
    {"kernel": (3, 3), "padding": (1, 1)},
    {"kernel": (5, 5), "padding": (4, 4), "dilation": (2, 2)},
    {"kernel": (5, 4), "padding": (0, 3), "stride": (1, 3), "dilation": (1, 2)},
    {"kernel": (2, 3), "padding": (2, 2), "stride": (3, 2), "dilation": (2, 3)},
    {"kernel": (1, 1)},
    {"kernel": (3, 1), "padding": (3, 2), "stride": (2, 4)},
    {"kernel": (2, 11), "padding": (0, 5)},
    {"kernel": (3, 23), "padding": (1, 11)},
    {"kernel": (2, 2), "padding": (6, 7), "stride": (6, 6), "dilation": (4, 5)},
]
"""Those of RedNet, and others: the last two have no tiles."""


def cases(seed: int, count: int) -> Iterator[Case]:
    """Random sizes and layouts."""
    draw = random.Random(seed)
    while count:
        made = Case(
            draw.choice([1, 2]),
            draw.choice([1, 2, 3]),
            draw.choice([1, 3, 8, 16, 33]),
            (draw.choice([1, 5, 7, 14, 19]), draw.choice([1, 4, 7, 14, 16, 29, 36])),
            **draw.choice(STEPS),
            last=draw.random() < 0.3,
            turned=draw.random() < 0.2,
            offset=draw.choice([0, 0, 1, 2, 4]),
        )
        if min(made.result) >= 1:
            count -= 1
            yield made


def expected(operator: str, arguments: tuple[Any, ...]) -> Tensor:
    """The reference's result in double precision."""
    wide = [each.double() if isinstance(each, Tensor) else each for each in arguments]
    result: Tensor = OPERATORS[operator].reference(*wide)
    return result


def held(found: Tensor, right: Tensor, dtype: torch.dtype, said: object) -> None:
    """Hold what a kernel gives to what is right."""
    assert found.dtype == dtype
    largest = right.abs().max().item() if right.numel() else 0.0
    within = UNITS[dtype] * torch.finfo(dtype).eps * max(1.0, largest)
    torch.testing.assert_close(found.double(), right, rtol=0, atol=within, msg=lambda text: f"{said}: {text}")


def poisoned(case: Case, odd: float, which: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors that are not finite in corners, where taps look beyond the image: all three, two, or one."""
    made = case.tensors(torch.float32)
    for each in made[:: 1 + which % 3] if which < 3 else made[which % 3 :: 3]:
        for place in (0, -1):
            each[(place,) * each.dim()] = odd
    return made


def empty(case: Case) -> Case:
    return replace(case, batch=0)
