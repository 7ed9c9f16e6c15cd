"""Inputs with other values than the example's, on which an export is compared with PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from opsmith.core.generate_like import generate_like

Draw = Callable[[Tensor, Tensor, torch.Generator], Tensor]
"""Draws values from a tensor of the example, and from one that is like it."""


def _of_both_signs(given: Tensor, like: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers up to the largest given one, the first with the other sign."""
    largest = given.abs().nan_to_num(0.0, 0.0, 0.0).max().item() or 1.0
    drawn = (torch.rand(given.shape, generator=generator, dtype=torch.float64) * 2 - 1) * largest
    same = float(drawn.flatten()[0]) * float(given.flatten()[0]) > 0
    return (-drawn if same else drawn).to(given.device, given.dtype)


def _range(given: Tensor) -> tuple[int, int]:
    return min(0, int(given.min())), max(1, int(given.max()))


def _whole(given: Tensor, like: Tensor, generator: torch.Generator) -> Tensor:
    low, high = _range(given)
    drawn = torch.randint(low, min(high, 2**62) + 1, given.shape, generator=generator)
    return drawn.to(given.device, given.dtype)


_DRAWS: tuple[tuple[str, bool | None, Draw], ...] = (
    ("like the example's", None, lambda given, like, _: like),
    ("of both signs, up to twice as large as the example's", True, lambda *given: 2 * _of_both_signs(*given)),
    ("half of the example's", True, lambda given, *_: given / 2),
    ("of both signs, up to half of the example's", True, lambda *given: _of_both_signs(*given) / 2),
    ("mirrored in the range of the example's", False, lambda x, *_: (sum(_range(x)) - x.long()).to(x.dtype)),
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
