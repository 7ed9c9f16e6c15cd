"""Inputs with other values than the example's, on which an export is compared with PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from opsmith.core.generate_like import generate_like

Draw = Callable[[Tensor, Tensor, torch.Generator], Tensor]
"""Draws values from a tensor of the example, and from one that is like it."""


def _like(given: Tensor, like: Tensor, generator: torch.Generator) -> Tensor:
    return like


def _of_both_signs(factor: float) -> Draw:
    def draw(given: Tensor, like: Tensor, generator: torch.Generator) -> Tensor:
        largest = given.abs().nan_to_num(0.0, 0.0, 0.0).max().item() or 1.0
        drawn = torch.rand(given.shape, generator=generator, dtype=torch.float64) * 2 - 1
        first = float(drawn.flatten()[0]) * float(given.flatten()[0])
        return (drawn * (-factor if first > 0 else factor) * largest).to(given.device, given.dtype)

    return draw


def _halved(given: Tensor, like: Tensor, generator: torch.Generator) -> Tensor:
    return given / 2


def _range(given: Tensor) -> tuple[int, int]:
    return min(0, int(given.min())), max(1, int(given.max()))


def _mirrored(given: Tensor, like: Tensor, generator: torch.Generator) -> Tensor:
    return (sum(_range(given)) - given.long()).to(given.dtype)


def _whole(given: Tensor, like: Tensor, generator: torch.Generator) -> Tensor:
    low, high = _range(given)
    drawn = torch.randint(low, min(high, 2**62) + 1, given.shape, generator=generator)
    return drawn.to(given.device, given.dtype)


_DRAWS: tuple[tuple[str, bool | None, Draw], ...] = (
    ("like the example's", None, _like),
    ("of both signs, up to twice as large as the example's", True, _of_both_signs(2.0)),
    ("half of the example's", True, _halved),
    ("of both signs, up to half of the example's", True, _of_both_signs(0.5)),
    ("mirrored in the range of the example's", False, _mirrored),
    ("from the range of the example's, 0 and 1", False, _whole),
)
"""Values in words; the numbers that they concern: floating ones, whole ones and booleans, or all."""


def other_values(given: Sequence[Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    """Inputs of the same sizes, with their values in words: those like the example's, and then others.

    Whole numbers and booleans stay in the range of the given ones, since they may be indices; the last inputs
    have 0 and 1 as well. Inputs that equal earlier ones are left out.

    Example:
        >>> [inputs for _, inputs in other_values([torch.tensor([True, False])])]
        [[tensor([False,  True])]]
    """
    generator = torch.Generator().manual_seed(0)
    seen = [list(given)]
    for words, floating, draw in _DRAWS:
        inputs = [each.detach() for each in given]
        for at, each in enumerate(inputs):
            if each.numel():
                like = generate_like(each, each.shape, generator)
                drawn = floating is None or each.is_floating_point() is floating
                inputs[at] = draw(each, like, generator) if drawn else like
        concerned = floating is None or any(each.is_floating_point() is floating for each in inputs)
        if concerned and not any(all(map(torch.equal, inputs, others)) for others in seen):
            seen.append(inputs)
            yield words, inputs
