"""What a function's results must be: its own values in float64, and how far from them a dtype may lead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import refuse_own
from opsmith.checking.numerics.compare import Difference, unequal
from opsmith.checking.numerics.rounding import Bound, Conditioning, Function, bound, conditioning, neighbours
from opsmith.checking.samples.sample import is_inexact, replica


@dataclass(frozen=True)
class Truth:
    """The right results for some arguments in some dtype.

    Args:
        ordinary: What the function itself returns in that dtype: form and strides, and exact values where a
            result is whole numbers or truth values.
        right: The same from float64, on the CPU, for those too: rounding may turn an `argmax` either way.
        bounds: The bound of each floating result.
    """

    ordinary: tuple[Tensor | None, ...]
    right: tuple[Tensor | None, ...]
    bounds: tuple[Bound | None, ...]

    def judge(self, position: int, got: Tensor) -> Difference | None:
        """The worst element of a result, if it is wrong; its shape must be right."""
        bound = self.bounds[position]
        if bound is not None:
            return bound.judge(got.cpu())
        ordinary, right = self.ordinary[position], self.right[position]
        assert ordinary is not None
        assert right is not None
        return unequal(got, ordinary, right)


@dataclass(frozen=True)
class Measure:
    """A function, and what a sample tells about its rounding; from it comes the truth for each dtype.

    Args:
        function: Takes flat arguments, returns results, some of which may be None.
        conditioning: How its results react to their inputs.
        own_errors: Error of the function itself in float32, in rounding units: it is the same in float64.
        has_truth: Whether a run in float64 is a better answer than one in the dtype itself.
    """

    function: Function
    conditioning: Conditioning
    own_errors: tuple[float, ...]
    has_truth: bool

    @classmethod
    def of(
        cls, function: Function, flat: Sequence[Any], generator: torch.Generator, *, has_truth: bool
    ) -> Measure:
        """Measure a function at these arguments."""
        wide = widened(flat)
        results = function(wide)
        blank = (0.0,) * len(results)
        if not has_truth:
            return cls(function, Conditioning.unknown(flat, len(results)), blank, False)
        measure = cls(function, conditioning(function, wide, results, generator), blank, True)
        errors = blank
        try:
            for near in neighbours(wide, generator):
                narrow = measure.truth([replica(value, torch.float32) for value in near], torch.float32)
                found = [b.own_error if b else 0.0 for b in narrow.bounds]
                errors = tuple(max(pair) for pair in zip(errors, found, strict=True))
        except (RuntimeError, TypeError, ValueError) as error:
            refuse_own(error)  # it does not run in float32, as the property reports
            return measure
        return replace(measure, own_errors=errors)

    def truth(self, flat: Sequence[Any], dtype: torch.dtype) -> Truth:
        """The right results for these arguments, given in this dtype."""
        ordinary = tuple(self.function(list(flat)))
        right = tuple(self.function(widened(flat))) if self.has_truth else tuple(map(_on_cpu, ordinary))
        bounds = tuple(self._bound(position, ordinary, right, dtype) for position in range(len(right)))
        return Truth(ordinary, right, bounds)

    def _bound(
        self,
        position: int,
        ordinary: Sequence[Tensor | None],
        right: Sequence[Tensor | None],
        dtype: torch.dtype,
    ) -> Bound | None:
        result, value = ordinary[position], right[position]
        if result is None or value is None or not is_inexact(value):
            return None
        found = bound(
            replica(value, torch.float64),
            result.detach().cpu() if self.has_truth else None,
            dtype,
            self.conditioning.sensitivity[position],
            self.conditioning.accumulated[position],
        )
        return replace(found, own_error=max(found.own_error, self.own_errors[position]))


def widened(flat: Sequence[Any]) -> list[Any]:
    """Arguments on the CPU, with floating tensors in float64 and complex ones in complex128."""
    return [replica(value, torch.float64, torch.device("cpu")) for value in flat]


def _on_cpu(result: Tensor | None) -> Tensor | None:
    return None if result is None else result.detach().cpu()
