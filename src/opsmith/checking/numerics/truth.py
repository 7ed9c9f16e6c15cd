"""Right results of a function: its own values in float64, with the bounds of each dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import refuse_own
from opsmith.checking.numerics.compare import Difference, exact_difference
from opsmith.checking.numerics.rounding_bounds import (
    Conditioning,
    Function,
    RoundingBound,
    conditioning,
    neighbours,
    rounding_bound,
)
from opsmith.checking.samples.sample import is_inexact, replica


@dataclass(frozen=True)
class Truth:
    """The right results for some arguments in some dtype.

    Args:
        ordinary: Results of the function itself in that dtype: their metadata, and exact values where a
            result is integer or boolean.
        right: Results in float64 on the CPU, exact ones too, since rounding may change an `argmax`.
        bounds: Bound of each floating result.
    """

    ordinary: tuple[Tensor | None, ...]
    right: tuple[Tensor | None, ...]
    bounds: tuple[RoundingBound | None, ...]

    def judge(self, position: int, got: Tensor) -> Difference | None:
        """Find the worst element of a result, if it is wrong; its shape must be right."""
        bound = self.bounds[position]
        if bound is not None:
            return bound.judge(got.cpu())
        ordinary, right = self.ordinary[position], self.right[position]
        assert ordinary is not None
        assert right is not None
        return exact_difference(got, ordinary, right)


@dataclass(frozen=True)
class MeasuredFunction:
    """A function with the measured rounding error of a sample, which gives the truth in each dtype.

    Args:
        function: Function of flat arguments; some of its results may be None.
        conditioning: Sensitivity of its results to its inputs.
        own_errors: Error of the function itself in float32, in rounding units; the same number holds in
            float64.
        has_truth: True if a run in float64 is a better answer than one in the dtype itself.
    """

    function: Function
    conditioning: Conditioning
    own_errors: tuple[float, ...]
    has_truth: bool

    @classmethod
    def of(
        cls, function: Function, flat: Sequence[Any], generator: torch.Generator, *, has_truth: bool
    ) -> MeasuredFunction:
        """Measure a function on these arguments."""
        wide = in_double_on_cpu(flat)
        results = function(wide)
        blank = (0.0,) * len(results)
        if not has_truth:
            return cls(function, Conditioning.unknown(flat, len(results)), blank, False)
        measure = cls(function, conditioning(function, wide, results, generator), blank, True)
        errors = blank
        try:
            for near in neighbours(wide, generator):
                in_float32 = measure.truth([replica(value, torch.float32) for value in near], torch.float32)
                found = [b.own_error if b else 0.0 for b in in_float32.bounds]
                errors = tuple(max(pair) for pair in zip(errors, found, strict=True))
        except (RuntimeError, TypeError, ValueError) as error:
            refuse_own(error)  # the property reports that it does not run in float32
            return measure
        return replace(measure, own_errors=errors)

    def truth(self, flat: Sequence[Any], dtype: torch.dtype) -> Truth:
        """Compute the right results for these arguments, given in this dtype."""
        ordinary = tuple(self.function(list(flat)))
        right = (
            tuple(self.function(in_double_on_cpu(flat))) if self.has_truth else tuple(map(_on_cpu, ordinary))
        )
        bounds = tuple(self._bound(position, ordinary, right, dtype) for position in range(len(right)))
        return Truth(ordinary, right, bounds)

    def _bound(
        self,
        position: int,
        ordinary: Sequence[Tensor | None],
        right: Sequence[Tensor | None],
        dtype: torch.dtype,
    ) -> RoundingBound | None:
        result, value = ordinary[position], right[position]
        if result is None or value is None or not is_inexact(value):
            return None
        found = rounding_bound(
            replica(value, torch.float64),
            result.detach().cpu() if self.has_truth else None,
            dtype,
            self.conditioning.sensitivity[position],
            self.conditioning.accumulated[position],
        )
        return replace(found, own_error=max(found.own_error, self.own_errors[position]))


def in_double_on_cpu(flat: Sequence[Any]) -> list[Any]:
    """Return the arguments on the CPU, floating tensors in float64 and complex ones in complex128."""
    return [replica(value, torch.float64, torch.device("cpu")) for value in flat]


def _on_cpu(result: Tensor | None) -> Tensor | None:
    return None if result is None else result.detach().cpu()
