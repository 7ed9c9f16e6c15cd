"""Hypotheses about a wrong tensor, which predict it from the right one, and their evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.diagnosis.decompositions import NAMED
from opsmith.checking.diagnosis.observation import Observation
from opsmith.core.cached_property import cached_property

Prediction = Callable[[Observation], Tensor | None]
"""Computes what the computed tensor is if a hypothesis holds; None where it says nothing."""


@dataclass(frozen=True)
class Detection:
    """A hypothesis: a cause, and what it predicts.

    Args:
        cause: One of `opsmith.checking.causes`.
        reason: Sentence that states it, without a capital letter and a full stop.
        evidence: Measured values.
        weak: True if another confirmed cause describes the fault better.
        predicted: The prediction to confirm; None if the cause has been shown otherwise.
    """

    cause: str
    reason: str
    evidence: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    weak: bool = False
    predicted: Prediction | None = field(default=None, compare=False, repr=False)


SIZES = 8
"""Largest number of other sizes."""
MORE = 8
"""Number of further fresh inputs that narrow down a condition."""


@dataclass(frozen=True)
class Evidence:
    """Observations that hypotheses are tested on.

    Args:
        first: The one that was found wrong, on which hypotheses are made.
    """

    first: Observation

    @cached_property
    def fresh(self) -> tuple[Observation, ...]:
        """Observations of the same shapes, on fresh inputs; none where nothing can be drawn again."""
        return self._drawn(0, self.fresh_count + 1)

    @property
    def fresh_count(self) -> int:
        """Number of fresh inputs on which a hypothesis must hold; one more for other integers."""
        return 0 if self.first.observer is None else self.first.observer.subject.effort.fresh

    @cached_property
    def more(self) -> tuple[Observation, ...]:
        """Further ones, where the first fit several conditions."""
        return self._drawn(self.fresh_count + 1, MORE) if self.first.exact is not None else ()

    def _drawn(self, first: int, count: int) -> tuple[Observation, ...]:
        """Draw observations with some seeds; where nothing can be drawn again, none."""
        observer = self.first.observer
        if observer is None:
            return ()
        flat, grads = [*self.first.inputs.values()], [*self.first.grads.values()]
        drawn = (observer.draw(flat, grads, seed) for seed in range(first, first + count))
        return tuple(each for each in drawn if each is not None)

    @cached_property
    def other_sizes(self) -> tuple[Observation, ...]:
        """Observations at other sizes, where elements can be compared."""
        observer, grads = self.first.observer, [*self.first.grads.values()]
        others = [] if observer is None else observer.elsewhere()[:SIZES]
        drawn = [each.draw(each.sample.in_double(), grads, seed) for seed, each in enumerate(others, start=1)]
        return tuple(each for each in drawn if each is not None and each.same_shape)

    @property
    def pairs(self) -> tuple[Observation, ...]:
        """The first observation and the fresh ones."""
        return (self.first, *self.fresh)

    def everywhere(self, holds: Callable[[Observation], bool]) -> bool:
        """Return True if a statement holds for the first observation and for every fresh one."""
        return holds(self.first) and all(holds(pair) for pair in self.fresh)

    def fits(self, predicted: Prediction) -> bool:
        """Return True if the computed tensor is the predicted one in every observation."""
        return self.everywhere(lambda pair: pair.equals(predicted(pair)))

    def first_fitting(self, hypotheses: Iterable[Detection]) -> Detection | None:
        """Return the first hypothesis that predicts nothing, or what every observation confirms."""
        fitting = (each for each in hypotheses if each.predicted is None or self.fits(each.predicted))
        return next(fitting, None)


def multiple(right: Tensor, actual: Tensor) -> complex | None:
    """Fit the number by which one tensor is a multiple of another; None where the right one is zero."""
    weight = float((right.abs() ** 2).sum())
    if not weight:
        return None
    factor = complex((right.conj() * actual).sum() / weight)
    real = not right.is_complex() or abs(factor.imag) <= NAMED * abs(factor)
    return complex(factor.real) if real else factor


def times(factor: complex, tensor: Tensor) -> Tensor:
    """Multiply a tensor by a factor, which is real where it has no imaginary part."""
    return tensor * (factor if factor.imag else factor.real)


def along(values: Tensor, dim: int, dims: int) -> Tensor:
    """Lay a row of values along one of several dimensions."""
    return values.reshape(-1, *[1] * (dims - dim - 1))


COMPARISONS: Mapping[Callable[[Tensor, Tensor], Tensor], tuple[str, str, str]] = MappingProxyType(
    {
        torch.eq: ("is", "the same as", "on the diagonal"),
        torch.lt: ("is less than", "less than", "above the diagonal"),
        torch.gt: ("is greater than", "greater than", "below the diagonal"),
        torch.le: ("is at most", "at most", "on and above the diagonal"),
        torch.ge: ("is at least", "at least", "on and below the diagonal"),
        torch.ne: ("is not", "another than", "off the diagonal"),
    }
)
"""Words for each comparison: of values, of indices, and of the row and column of an element."""
