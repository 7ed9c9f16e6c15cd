"""What the examples of a batch give one after the other, and what is wrong with what came instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.difference import Difference, form_fault, unequal
from opsmith.checking.examples import side_by_side
from opsmith.checking.sample import is_inexact
from opsmith.checking.truth import Measure, Truth

OneByOne = Callable[[list[Any]], Sequence[Tensor | None]]
"""From the flat arguments of one example to its results."""


@dataclass(frozen=True)
class Loop:
    """What the examples give, one after the other.

    Args:
        function: Takes one example.
        rows: The flat arguments of each example.
        places: The arguments in which they differ.
        generator: Source of what measures rounding.
        has_truth: Whether a run in float64 is a better answer than one in the dtype itself.
        dtype: dtype of floating arguments.
        summed: Positions of results that are added up over the examples, and not stacked.
        instead: What may compute a batch in the place of the function, and round as it does: the reference,
            where the function runs a kernel.
    """

    function: OneByOne
    rows: Sequence[list[Any]]
    places: Sequence[int]
    generator: torch.Generator
    has_truth: bool
    dtype: torch.dtype
    summed: frozenset[int] = frozenset()
    instead: OneByOne | None = None

    @cached_property
    def expected(self) -> list[Tensor | None]:
        """The right results of the whole batch."""
        return self._together(self.function, self._batch)

    @cached_property
    def _batch(self) -> list[Any]:
        return side_by_side(self.rows, dict.fromkeys(self.places, 0))

    def _together(self, function: OneByOne, batch: Sequence[Any]) -> list[Tensor | None]:
        each = [
            function(
                [value[row].clone() if place in self.places else value for place, value in enumerate(batch)]
            )
            for row in range(len(self.rows))
        ]
        return [self._joined(position, column) for position, column in enumerate(zip(*each, strict=True))]

    def _joined(self, position: int, column: Sequence[Tensor | None]) -> Tensor | None:
        there = [each for each in column if each is not None]
        if not there:
            return None
        stacked = torch.stack(there)
        return stacked.sum(0) if position in self.summed else stacked

    def fault(self, position: int, got: Tensor | None) -> Fault | None:
        """What is wrong with a result; None where it is right, to rounding."""
        right = self.expected[position]
        if got is None and right is None:
            return None
        if got is None or right is None:
            mine, theirs = ("None" if each is None else "a tensor" for each in (got, right))
            return Fault("missing", mine, theirs)
        form = form_fault(got, right, strides=False)
        if form is not None:
            return Fault(*form)
        if unequal(got, right) is None or _near(got, right):
            return None
        found = [truth.judge(position, got.detach()) for truth in self._truths]
        difference = next(iter(found))
        return None if difference is None or None in found else Fault("value", difference=difference)

    @cached_property
    def _truths(self) -> list[Truth]:
        """The right results with their bounds: measured only where something is not equal bit by bit."""
        truths = []
        for function in (self.function, self.instead):
            if function is None:
                continue
            together = partial(self._together, function)
            measure = Measure.of(together, self._batch, self.generator, has_truth=self.has_truth)
            truths.append(measure.truth(self._batch, self.dtype))
        return truths


NEAR = 4
"""Roundings of its largest element that a tensor may be off without its conditioning being measured: the same
operations on a whole batch add up in another order, and little more."""


def _near(got: Tensor, right: Tensor) -> bool:
    """Whether no element is further off than a few roundings of the largest."""
    if not is_inexact(right) or not right.numel() or not bool(right.isfinite().all()):
        return False
    return bool((got - right).abs().max() <= NEAR * torch.finfo(right.dtype).eps * right.abs().max())


@dataclass(frozen=True)
class Fault:
    """What is wrong with one result of a batch.

    Args:
        aspect: `shape`, `dtype`, `device`, `missing` or `value`; of compiled code also `count`, of results,
            and `graph`, whether autograd follows one; where numbers are drawn, `result`.
        got: The form that came.
        expected: The form that is right.
        difference: Where the values differ.
    """

    aspect: str
    got: str = ""
    expected: str = ""
    difference: Difference | None = None

    @property
    def cause(self) -> str:
        """The word for it."""
        return self.aspect if self.aspect in ("shape", "dtype") else "kernel-mismatch"

    def __str__(self) -> str:
        if self.difference is not None:
            return f"{self.difference}"
        if self.aspect == "missing":
            return f"it is {self.got}, where {self.expected} is right"
        return f"it has the {self.aspect} {self.got}, where {self.expected} is right"

    def evidence(self) -> dict[str, Any]:
        """What a report keeps of it."""
        if self.difference is not None:
            return self.difference.evidence()
        return {"got": self.got, "expected": self.expected}
