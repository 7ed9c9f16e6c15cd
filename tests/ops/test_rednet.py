"""RedNet has the parameters and the multiply-adds that the paper reports, and learns."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from opsmith.ops.rednet import BLOCKS, RedNet, rednet

REPORTED = {26: (9.23, 1.73), 38: (12.39, 2.22), 50: (15.54, 2.71), 101: (25.65, 4.74), 152: (33.99, 6.79)}
"""Millions of parameters and 10**9 multiply-adds at 224x224: arXiv:2103.06255, table 2."""

PER_ELEMENT = {nn.BatchNorm2d: 2, nn.ReLU: 1, nn.AvgPool2d: 1, nn.MaxPool2d: 1, nn.AdaptiveAvgPool2d: 1}
"""Operations for each element that a layer is given: of what is no product, as is usual in such tables."""


def multiply_adds(network: nn.Module, images: Tensor) -> float:
    """10**9 multiply-adds of convolutions, involutions and the linear layer, with what else is counted."""
    others = 0

    def counting(each: int) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def count(layer: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> None:
            nonlocal others
            others += each * given[0].numel()

        return count

    for layer in network.modules():
        if type(layer) in PER_ELEMENT:
            layer.register_forward_hook(counting(PER_ELEMENT[type(layer)]))
    with FlopCounterMode(display=False) as counter:
        network(images)
    return (counter.get_total_flops() / 2 + others) / 1e9


@pytest.mark.every(8)
@pytest.mark.parametrize(
    "depth", [pytest.param(each, marks=pytest.mark.slow if each > 50 else ()) for each in REPORTED]
)
def test_it_is_as_large_as_the_paper_says(depth: int) -> None:
    parameters, operations = REPORTED[depth]
    with torch.device("meta"):
        network, images = rednet(depth).eval(), torch.empty(1, 3, 224, 224)
    assert sum(each.numel() for each in network.parameters()) / 1e6 == pytest.approx(parameters, abs=0.01)
    assert multiply_adds(network, images) == pytest.approx(operations, rel=0.02)


def test_every_depth_of_the_paper_is_there() -> None:
    assert BLOCKS.keys() == REPORTED.keys()


def test_sides_that_no_stride_divides() -> None:
    network = RedNet((1, 1), classes=3, width=32)
    assert network(torch.randn(2, 3, 37, 50)).shape == (2, 3)


@pytest.mark.slow
def test_a_small_network_learns() -> None:
    torch.manual_seed(0)
    network = RedNet((1, 1), classes=2, in_channels=1, width=32, kernel_size=3, small=True)
    labels = torch.arange(16) % 2
    images = torch.randn(16, 1, 8, 8) + labels[:, None, None, None]
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    losses = []
    for _ in range(8):
        loss = nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4


@pytest.mark.parametrize("depth", [34, "50", 50.0, None, [50]], ids=repr)
def test_another_depth_is_an_error(depth: Any) -> None:
    says = f"expected the depth of a RedNet of the paper, 26, 38, 50, 101, 152, got {depth!r}; choose"
    with pytest.raises(ValueError, match=f"^{re.escape(says)}"):
        rednet(depth)


@pytest.mark.parametrize(("width", "of_group", "step"), [(48, 16, 32), (4, 1, 8), (36, 6, 24)])
def test_a_width_that_the_stem_cannot_halve_is_an_error(width: int, of_group: int, step: int) -> None:
    says = (
        rf"^expected the width of a RedNet to be a multiple of {step}, because channels_per_group is "
        rf"{of_group}, got {width}; choose a different width: `RedNet\(\(1, 1\), width={step}\)`$"
    )
    with pytest.raises(ValueError, match=says):
        RedNet((1, 1), width=width, channels_per_group=of_group)
    assert RedNet((1,), width=step, channels_per_group=of_group).head.in_features == 4 * step


@pytest.mark.parametrize("number", [0, -16, 2.5, "16", None, True, [16]], ids=repr)
@pytest.mark.parametrize("argument", ["classes", "in_channels", "width", "kernel_size", "channels_per_group"])
def test_what_is_no_number_to_count_with_is_an_error(argument: str, number: Any) -> None:
    says = (
        f"RedNet expects `{argument}` to be a whole number of at least 1, got {number!r}; choose other "
        "numbers"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(says)}"):
        RedNet((1, 1), **{argument: number})


@pytest.mark.parametrize(
    "blocks", [(), 3, None, "12", (1, 0), (-1,), (1.0,), (True,), torch.tensor(3)], ids=repr
)
def test_what_is_no_blocks_of_stages_is_an_error(blocks: Any) -> None:
    says = "RedNet expects `blocks` to be one or more whole numbers of at least 1, one for each stage, got "
    with pytest.raises(ValueError, match=f"^{re.escape(says + repr(blocks))}; choose other numbers"):
        RedNet(blocks, width=32)


def test_blocks_may_come_of_a_generator() -> None:
    assert len(RedNet((count for count in (1, 2)), width=32).stages) == 2  # type: ignore[arg-type]


def test_what_a_generator_gave_is_shown_and_not_its_address() -> None:
    with pytest.raises(ValueError, match=r"one for each stage, got \(1, 0\); choose other numbers"):
        RedNet(count for count in (1, 0))  # type: ignore[arg-type]


def test_an_even_kernel_is_an_error_of_the_layer() -> None:
    with pytest.raises(ValueError, match=r"^Involution2d expects `kernel_size` to be an odd number"):
        RedNet((1, 1), kernel_size=4)
