"""One call with special values in one of its inputs, and when what comes of it is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.nudging import nudged
from opsmith.checking.sample import Sample
from opsmith.checking.special_values import Group
from opsmith.checking.subject import NUDGES, Subject

WAYS = 2


@dataclass(frozen=True)
class Trial:
    """A sample with special values in one of its inputs.

    Args:
        subject: What is under check.
        sample: The sample.
        place: The input.
        flat: The arguments.
        where: Which value stands at which position.
        group: What the values are.
        dtype: dtype of the arguments.
    """

    subject: Subject
    sample: Sample
    place: int
    flat: list[Any]
    where: dict[int, float]
    group: Group
    dtype: torch.dtype

    @property
    def label(self) -> str:
        """How messages call the input."""
        return self.sample.labels[self.place]

    def fresh(self) -> list[Any]:
        """The arguments, which a call may write into."""
        return [value.clone() if isinstance(value, Tensor) else value for value in self.flat]

    def nudged(self) -> Iterator[list[Any]]:
        """The arguments, each number moved by a few rounding units up or down, in several ways."""
        step = 16 * torch.finfo(self.dtype).eps
        generator = self.subject.generator(NUDGES)
        for _ in range(WAYS):
            yield [nudged(value, step, generator) for value in self.fresh()]


def differs(mine: Tensor, theirs: Tensor, spread: Tensor, *, hold_nan: bool) -> Tensor:
    """Elements that are not what they should be, but for rounding.

    Args:
        mine: What came.
        theirs: What the reference gives.
        spread: How far that moves when its input moves by some rounding units.
        hold_nan: Whether nan must be nan: it comes from what went in, and not from overflow.
    """
    mine = mine.to(theirs.dtype)
    coarse = torch.finfo(theirs.dtype).eps ** 0.5
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    usual = theirs.abs()[theirs.isfinite() & (theirs != 0)]
    size = theirs.abs() + (usual.median() if usual.numel() else 0)
    near = (mine - theirs).abs() <= coarse * size + 4 * spread + torch.finfo(theirs.dtype).tiny / coarse
    judged = theirs.isfinite() | (theirs.isnan() if hold_nan else torch.zeros_like(same))
    wrong: Tensor = judged & ~same & ~near
    return wrong
