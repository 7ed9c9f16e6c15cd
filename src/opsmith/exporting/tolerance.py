"""How far a file may be off from PyTorch: what rounding explains, and no more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ONCE, EACH = 16, 4
"""Of the result's unit: what one node may lose, and what the square root of their number adds."""

AS_OFF = 4
"""How many times as far off as PyTorch itself a file may be, where PyTorch is far off from float64."""


@dataclass(frozen=True)
class Tolerance:
    """What is allowed for one output.

    Args:
        relative: The largest difference, as a part of the largest value.
        reason: Where that comes from.
    """

    relative: float
    reason: str


def tolerance(dtype: torch.dtype, nodes: int) -> Tolerance:
    """What is allowed for an output of a file with so many nodes.

    Each node rounds once, and both sides sum in orders of their own: errors that are independent grow with
    the square root of their number.

    Example:
        >>> tolerance(torch.int64, 9).relative
        0.0
    """
    if not dtype.is_floating_point:
        return Tolerance(0.0, "whole numbers are equal")
    unit = torch.finfo(dtype).eps
    allowed = unit * (ONCE + EACH * math.sqrt(nodes))
    name = str(dtype).removeprefix("torch.")
    round_ = "1 node that rounds" if nodes == 1 else f"{nodes} nodes that round"
    return Tolerance(allowed, f"eps({name}) × ({ONCE} + {EACH} √{nodes}), for {round_}")


def in_coarser(dtype: torch.dtype, coarsest: torch.dtype | None, nodes: int) -> Tolerance | None:
    """What is allowed for an output that is computed from values of a coarser type; None if there are none.

    Example:
        >>> in_coarser(torch.float32, torch.float16, 9).reason
        'eps(float16) × (16 + 4 √9), for 9 nodes that round, some of them to float16'
    """
    if not dtype.is_floating_point or coarsest is None:
        return None
    if torch.finfo(coarsest).eps <= torch.finfo(dtype).eps:
        return None
    allowed = tolerance(coarsest, nodes)
    name = str(coarsest).removeprefix("torch.")
    return Tolerance(allowed.relative, f"{allowed.reason}, some of them to {name}")


def difference(got: Tensor, want: Tensor) -> float:
    """The largest difference, as a part of the largest value; inf where shapes, dtypes or nans differ.

    Example:
        >>> difference(torch.tensor([1.0, 4.5]), torch.tensor([1.0, 4.0]))
        0.125
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        return math.inf
    if not want.numel():
        return 0.0
    if not want.dtype.is_floating_point:
        return 0.0 if torch.equal(got, want) else math.inf
    one, two = got.double(), want.double()
    special = ~torch.isfinite(two)
    if not torch.equal(special, ~torch.isfinite(one)):
        return math.inf
    if not torch.equal(one[special].nan_to_num(2.0), two[special].nan_to_num(2.0)):
        return math.inf
    plain = two[~special]
    if not plain.numel():
        return 0.0
    largest = plain.abs().max().item()
    return float((one[~special] - plain).abs().max().item() / (largest or 1.0))


def in_float64(model: torch.nn.Module, inputs: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
    """What a model computes in float64, from the same parameters; None where it does not run in it."""
    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]
    try:
        with torch.no_grad():
            results: Any = deepcopy(model).double()(*wide)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):  # it has a dtype written in it
        return None
    return tuple(results)


def explained(got: Tensor, want: Tensor, truth: Tensor) -> Tolerance | None:
    """What is allowed where PyTorch itself is off from float64; None if that explains nothing.

    Rounding explains what leaves half of the digits. Where PyTorch is further off, as by a kernel that is
    wrong and takes no float64, its own error is no measure.
    """
    if not want.dtype.is_floating_point or truth.shape != want.shape:
        return None
    own = difference(want.double(), truth)
    its = difference(got.double(), truth)
    half = math.sqrt(torch.finfo(want.dtype).eps)
    if not own <= half or not its <= AS_OFF * own:  # nan is no answer either
        return None
    return Tolerance(
        (AS_OFF + 1) * own, f"{AS_OFF + 1} times what PyTorch itself is off from float64, {own:.1e}"
    )
