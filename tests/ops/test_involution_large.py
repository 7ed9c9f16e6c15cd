"""Involution over more than 2^31 elements: the kernels in C++ count in 64 bits."""

from __future__ import annotations

import multiprocessing
import resource
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from opsmith.ops.involution import involution, involution_input_gradient, involution_weight_gradient

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="C++ kernels are built on Linux"),
    pytest.mark.xdist_group("involution_kernels"),
]

GIB = 1 << 30
CHANNELS, SIDE = 8192, 513  # 2^31 + 8.4 million pixels
WIDE = 6700  # squared times 49 taps: 2^31 + 52 million weights
TOLERANCE = 1.6e-2  # of the largest element: bfloat16 rounds once, after sums in float32


def filled(*shape: int) -> Tensor:
    """A tensor in bfloat16 of random numbers that repeat after a million and three."""
    block = torch.randn(1_000_003, generator=torch.Generator().manual_seed(len(shape))).bfloat16()
    tensor = torch.empty(shape, dtype=torch.bfloat16)
    flat = tensor.view(-1)
    for start in range(0, flat.numel(), block.numel()):
        piece = flat[start : start + block.numel()]
        piece.copy_(block[: piece.numel()])
    return tensor


def hold(actual: Tensor, expected: Tensor) -> None:
    expected = expected.float()
    largest = float(expected.abs().max())
    assert largest > 0
    assert float((actual.float() - expected).abs().max()) <= TOLERANCE * largest


def many_pixels_forward() -> None:
    image, weight = filled(1, CHANNELS, SIDE, SIDE), filled(1, 1, 3, 3, SIDE, SIDE)
    assert image.numel() > 1 << 31
    result = involution(image, weight, 1, 1)
    for first in (0, CHANNELS // 2, CHANNELS - 4):
        some = slice(first, first + 4)
        hold(result[:, some], involution.reference(image[:, some].float(), weight.float(), 1, 1))


def many_pixels_by_input() -> None:
    cotangent, weight = filled(1, CHANNELS, SIDE, SIDE), filled(1, 1, 3, 3, SIDE, SIDE)
    result = involution_input_gradient(cotangent, weight, (SIDE, SIDE), 1, 1)
    assert result.numel() > 1 << 31
    for first in (0, CHANNELS // 2, CHANNELS - 4):
        part = cotangent[:, first : first + 4].float()
        expected = involution_input_gradient.reference(part, weight.float(), (SIDE, SIDE), 1, 1)
        hold(result[:, first : first + 4], expected)


def many_pixels_by_weight() -> None:
    image = filled(1, CHANNELS, SIDE, SIDE)
    assert image.numel() > 1 << 31
    result = involution_weight_gradient(image, image, 1, (3, 3), 1, 1)
    # Rows of the result see three rows of the image: compared are the first, some in the middle, the last.
    for first in (0, SIDE // 2, SIDE - 1):
        rows = slice(max(first - 1, 0), min(first + 2, SIDE))
        expected = torch.zeros(1, 1, 3, 3, rows.stop - rows.start, SIDE)
        for channel in range(0, CHANNELS, 256):
            part = image[:, channel : channel + 256, rows].float()
            expected += involution_weight_gradient.reference(part, part, 1, (3, 3), 1, 1)
        at = first - rows.start
        hold(result[..., first, :], expected[..., at, :])


def many_weights_forward() -> None:
    image, weight = filled(1, 1, WIDE, WIDE), filled(1, 1, 7, 7, WIDE, WIDE)
    assert weight.numel() > 1 << 31
    result = involution(image, weight, 1, 3)
    expected = involution.reference(image[:, :, -16:].float(), weight[..., -16:, :].float(), 1, 3)
    hold(result[:, :, -13:], expected[:, :, 3:])


def many_weights_by_input() -> None:
    cotangent, weight = filled(1, 1, WIDE, WIDE), filled(1, 1, 7, 7, WIDE, WIDE)
    result = involution_input_gradient(cotangent, weight, (WIDE, WIDE), 1, 3)
    last = cotangent[:, :, -16:].float(), weight[..., -16:, :].float()
    hold(result[:, :, -13:], involution_input_gradient.reference(*last, (16, WIDE), 1, 3)[:, :, 3:])


def many_weights_by_weight() -> None:
    cotangent, image = filled(1, 1, WIDE, WIDE), filled(1, 1, 1, WIDE).expand(1, 1, WIDE, WIDE)
    result = involution_weight_gradient(cotangent, image, 1, (7, 7), 1, 3)
    assert result.numel() > 1 << 31
    last = cotangent[:, :, -16:].float(), image[:, :, -16:].float()
    expected = involution_weight_gradient.reference(*last, 1, (7, 7), 1, 3)
    hold(result[..., -13:, :], expected[..., 3:, :])


def _measured(case: Callable[[], None], results: Any) -> None:
    torch.set_num_threads(2)
    case()
    results.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


@pytest.mark.parametrize(
    "case",
    [
        many_pixels_forward,
        many_pixels_by_input,
        many_pixels_by_weight,
        many_weights_forward,
        many_weights_by_input,
        many_weights_by_weight,
    ],
    ids=lambda case: case.__name__,
)
def test_more_elements_than_32_bits_count(case: Callable[[], None]) -> None:
    context = multiprocessing.get_context("spawn")  # its peak of memory is the case's own
    results = context.SimpleQueue()
    process = context.Process(target=_measured, args=(case, results))
    process.start()
    process.join()
    assert process.exitcode == 0
    peak = results.get()
    assert peak < 12 * GIB, f"{peak / GIB:.1f} GiB"
