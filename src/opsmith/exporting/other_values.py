"""Inputs whose values differ from the example's, on which an export is compared with PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from opsmith.core.generate_like import generate_like

Draw = Callable[[Tensor, Tensor, torch.Generator], Tensor]
"""Function that draws values from a tensor of the example and from a tensor that is like it."""


def _of_both_signs(given: Tensor, like: Tensor, generator: torch.Generator) -> Tensor:
    """Random numbers up to the largest given magnitude; the first has the opposite sign of the given one."""
    largest = given.abs().nan_to_num(0.0, 0.0, 0.0).max().item() or 1.0
    drawn = (torch.rand(given.shape, generator=generator, dtype=torch.float64) * 2 - 1) * largest
    same = float(drawn.flatten()[0]) * float(given.flatten()[0]) > 0
    return (-drawn if same else drawn).to(given.device, given.dtype)


def _again(given: Tensor, like: Tensor, generator: torch.Generator) -> Tensor:
    chosen = torch.rand(given.shape, generator=generator) < 0.5
    return chosen.to(given.device) if given.dtype == torch.bool else like


_DRAWS: tuple[tuple[str, bool | None, Draw], ...] = (
    ("like the example's values", None, lambda given, like, _: like),
    (
        "of both signs, up to twice as large as the example's values",
        True,
        lambda *given: 2 * _of_both_signs(*given),
    ),
    ("half of the example's values", True, lambda given, *_: given / 2),
    ("of both signs, up to half of the example's values", True, lambda *given: _of_both_signs(*given) / 2),
    ("drawn again from the range of the example's values", False, _again),
    ("drawn once more from the range of the example's values", False, _again),
)
"""Values in words; True for floating inputs, False if the inputs have no floating numbers, None for all."""


def other_values(given: Sequence[Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    """Inputs of the same sizes, each with its values in words: first like the example's values, then unlike.

    Whole numbers stay in the range of the given numbers, and stay sorted if the given numbers are sorted,
    since kernels may use them as unchecked indices or offsets. Inputs that equal earlier ones are left out.

    Example:
        >>> [values for values, _ in other_values([torch.zeros(3)])][0]
        "of both signs, up to twice as large as the example's values"
    """
    generator = torch.Generator().manual_seed(0)
    seen = [list(given)]
    any_floating = any(each.is_floating_point() for each in given)
    for words, floating, draw in _DRAWS:
        inputs = [each.detach() for each in given]
        for at, each in enumerate(inputs):
            if each.numel():
                like = generate_like(each, each.shape, generator)
                drawn = floating is None or each.is_floating_point() is floating
                inputs[at] = draw(each, like, generator) if drawn else like
        concerned = floating is None or floating is any_floating
        if concerned and not any(all(map(torch.equal, inputs, others)) for others in seen):
            seen.append(inputs)
            yield words, inputs
