"""Detectors: each tests one family of hypotheses about a wrong tensor on fresh inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from opsmith.checking.diagnosis.detectors import (
    broadcast,
    grad_output,
    missing_term,
    position,
    precision,
    region,
    scale,
)
from opsmith.checking.diagnosis.evidence import Detection, Evidence
from opsmith.checking.diagnosis.observation import Observation

__all__ = ["DETECTORS", "Detector"]


@dataclass(frozen=True)
class Detector:
    """A detector, and the differences that it applies to.

    Args:
        detect: Makes hypotheses on the first pair, tests them on all, and yields those that hold.
        any_size: True if it also applies to a difference as small as rounding.
        any_shape: True if it also applies to a tensor of another shape.
        needless_after: Causes that make it unnecessary.
        last_resort: True if it runs only where nothing but weak detections was made before.
    """

    detect: Callable[[Evidence], Iterator[Detection]]
    any_size: bool = False
    any_shape: bool = False
    needless_after: frozenset[str] = frozenset()
    last_resort: bool = False

    def applies(self, pair: Observation, found: Mapping[str, Detection]) -> bool:
        """Return True if to run it on a pair after some detections, by cause."""
        if not pair.same_shape:
            return self.any_shape
        if pair.is_small and not self.any_size:
            return False
        if self.last_resort and not all(each.weak for each in found.values()):
            return False
        return not self.needless_after & set(found)


DETECTORS = (
    Detector(broadcast.broadcast, any_shape=True),
    Detector(missing_term.missing, any_size=True),
    Detector(precision.nonfinite, any_size=True),
    Detector(grad_output.grad_output_dependence, any_size=True),
    Detector(precision.precision, any_size=True),
    Detector(scale.sign),
    Detector(scale.scale),
    Detector(scale.per_index_scale),
    Detector(position.swapped, any_shape=True),
    Detector(position.transposed, any_shape=True),
    Detector(position.shifted),
    Detector(region.region),
    Detector(missing_term.forgotten_number),
    Detector(
        missing_term.missing_term,  # it takes the longest
        needless_after=frozenset(
            {
                *("nan", "missing-gradient", "ignores-grad-output", "nonlinear-grad"),
                *("precision", "transposed", "shifted"),
            }
        ),
    ),
    Detector(grad_output.jacobian_sparsity, last_resort=True),  # it runs a backward for each element
)
"""All detectors, in the order in which they run; the table of causes decides which cause comes first."""
