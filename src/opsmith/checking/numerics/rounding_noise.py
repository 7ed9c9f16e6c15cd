"""Rounding noise of a function, measured by how far its results move with the last digit of its inputs.

It is what is left to compare where a right result is zero but for rounding. `noise` measures the noise of
weighted results, from which the steps of finite differences follow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opsmith.checking.numerics.compare import all_close, largest_magnitude
from opsmith.checking.numerics.tolerance import Function, allowed_roundings, farthest_moves
from opsmith.checking.samples.sample import is_inexact, replica

NOISE_DRAWS = 16
"""Largest number of perturbations that may show rounding noise: a small tensor's is often zero."""


def noise_level(
    function: Function, flat: list[Any], generator: torch.Generator, computed_in: torch.dtype = torch.float64
) -> float:
    """Return the largest noise of any element, as of `noise_of_elements`."""
    found = noise_of_elements(function, flat, generator, computed_in)
    return max((largest_magnitude(each) for each in found if each is not None), default=0.0)


def noise_of_elements(
    function: Function,
    flat: list[Any],
    generator: torch.Generator,
    computed_in: torch.dtype = torch.float64,
    *,
    jumps: bool = True,
) -> list[Tensor | None]:
    """Measure the rounding noise of a function: how far its results move with the last digit of its inputs.

    Args:
        function: Takes flat arguments in float64.
        flat: Its arguments.
        generator: Source of the signs.
        computed_in: dtype that the function computes in, whatever its arguments are in.
        jumps: False if a move that is larger than rounding, as at a jump, does not count.

    Returns:
        For each floating result the largest move of each element, times the roundings that a right
        computation may err by; None for any other result.
    """
    unmoved, eps = function([replica(value) for value in flat]), torch.finfo(computed_in).eps
    farthest = [torch.zeros_like(t).abs() if t is not None and is_inexact(t) else None for t in unmoved]
    inputs = max((largest_magnitude(value) for value in flat if is_inexact(value)), default=0.0)
    for draw in range(NOISE_DRAWS):
        # Steps differ: of one element the signs alone give two values.
        moves = farthest_moves(function, flat, unmoved, eps * (1 + draw / NOISE_DRAWS), 1, generator)
        for position, (known, move, result) in enumerate(zip(farthest, moves, unmoved, strict=True)):
            if known is not None and move is not None and result is not None:
                most = torch.inf if jumps else eps**0.5 * max(inputs, largest_magnitude(result))
                farthest[position] = torch.maximum(known, move.masked_fill(~(move <= most), 0.0))
    return [None if each is None else allowed_roundings(1) * each for each in farthest]


def is_noise(
    function: Function,
    flat: list[Any],
    got: Tensor,
    expected: Tensor,
    generator: torch.Generator,
    computed_in: torch.dtype = torch.float64,
    *,
    jumps: bool = True,
) -> bool:
    """True if two answers are as close as a function's, when its inputs move by their last digit.

    What is zero but for rounding, as the gradient of a norm of one element, has no digits to compare.

    Args:
        function: Takes flat arguments in float64, and gives either answer as its only result.
        flat: Its arguments.
        got: One answer.
        expected: The other one.
        generator: Source of the signs.
        computed_in: dtype whose last digit it is: what the function computes in.
        jumps: As of `noise_of_elements`.

    Example:
        >>> three = [torch.tensor([0.1, 0.2, -0.3], dtype=torch.float64)]
        >>> total = lambda flat: [flat[0].sum()]
        >>> is_noise(total, three, torch.tensor(0.0), total(three)[0], torch.Generator().manual_seed(0))
        True
    """
    if got.shape != expected.shape or not bool((got.isfinite() & expected.isfinite()).all()):
        return False
    (noise,) = noise_of_elements(function, flat, generator, computed_in, jumps=jumps)
    if noise is None:
        return False
    noise = noise.to(expected.device)
    # An element that is noise as a whole is as good as any other one of these: each shows by chance how far.
    whole = noise[torch.maximum(got.abs(), expected.abs()).to(noise.device) <= noise]
    floor = float(whole.max()) if whole.numel() else 0.0
    return all_close(got, expected, noise.clamp(min=floor))
