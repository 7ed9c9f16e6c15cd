"""One call with special values in one of its inputs, and when what comes of it is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import refuse_own
from opsmith.checking.numerics.autodiff import vjp
from opsmith.checking.numerics.rounding import LIBRARY
from opsmith.checking.samples.perturb import nudged
from opsmith.checking.samples.sample import Sample
from opsmith.checking.samples.special_values import Group
from opsmith.checking.side_effects.global_settings import quiet
from opsmith.checking.subject import NUDGES, Subject

WAYS = 2
"""In so many ways the arguments are nudged: what stays in all of them does not hang on rounding."""


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

    @property
    def listed(self) -> str:
        """The special values, one after the other."""
        values = dict.fromkeys(self.where.values()) if self.group.everywhere else self.where.values()
        return ", ".join(f"{value:g}" for value in values)

    @property
    def filled(self) -> str:
        """How much of the input special values fill that stand everywhere in it."""
        return "all" if len(self.where) == self.flat[self.place].numel() else "a row"

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


def lost(trial: Trial, place: int, grads: Sequence[Tensor | None]) -> float:
    """What rounding may take of a gradient where its terms cancel, as those of a softmax near a one do.

    Its terms are as large as it is at the sample's own values, where it is known to be right. At special
    values it may be as small as 1e-40, or as large as 1e100: neither tells how large its terms are.

    Args:
        trial: The call.
        place: The input that is differentiated by.
        grads: What comes in for each visible result.
    """
    subject, sample = trial.subject, trial.sample
    try:
        with quiet():
            found = vjp(partial(subject.call, sample), sample.at(trial.dtype), (place,), grads)
    except Exception as error:
        refuse_own(error)
        return 0.0  # what it raises there, other properties report
    usual = None if found is None else found[0]
    if usual is None or not bool(usual.isfinite().any()):
        return 0.0
    return LIBRARY * torch.finfo(trial.dtype).eps * float(usual[usual.isfinite()].abs().max())
