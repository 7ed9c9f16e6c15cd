"""Diagnosis: run every detector, and name the detected cause of highest precedence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.causes import UNKNOWN, first_of
from opsmith.checking.diagnosis.detectors import grad_output, missing_term, position, precision, region, scale
from opsmith.checking.diagnosis.observation import (
    SAME,
    Detection,
    Evidence,
    Observation,
    Source,
    values_beside,
)
from opsmith.display import short_repr
from opsmith.judging.compare import all_close


@dataclass(frozen=True)
class Diagnosis:
    """Diagnosis of a wrong tensor.

    Args:
        cause: A cause of `opsmith.checking.causes`.
        reason: Sentence about the tensor as `it`; empty if nothing is known.
        also_fits: Other causes that the evidence confirms, each with its own reason.
        evidence: Measured values.
    """

    __repr__ = short_repr

    cause: str
    reason: str
    also_fits: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    evidence: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Detector:
    """A detector, with the differences to which it applies.

    Args:
        detect: Yields hypotheses on the first pair; the first hypothesis that is true on all is a detection.
        any_size: True if it also applies to differences as small as rounding.
        needless_after: Causes that make the detector unnecessary if they were detected before.
        last_resort: True if it runs only if all earlier detections are weak.
    """

    detect: Callable[[Evidence], Iterator[Detection]]
    any_size: bool = False
    needless_after: frozenset[str] = frozenset()
    last_resort: bool = False

    def applies(self, pair: Observation, found: Mapping[str, Detection]) -> bool:
        """Return True if it must run on a pair after some detections, given by cause."""
        if pair.is_small and not self.any_size:
            return False
        if self.last_resort and not all(each.weak for each in found.values()):
            return False
        return not self.needless_after & set(found)


EXPLAINING = frozenset(
    ("nan", "missing-gradient", "ignores-grad-output", "nonlinear-grad", "precision", "transposed", "shifted")
)

DETECTORS = (
    Detector(position.broadcast),
    Detector(missing_term.missing, any_size=True),
    Detector(precision.nonfinite, any_size=True),
    Detector(grad_output.grad_output_dependence, any_size=True),
    Detector(precision.precision, any_size=True),
    Detector(scale.sign),
    Detector(scale.scale),
    Detector(scale.per_index_scale),
    Detector(position.swapped),
    Detector(position.transposed),
    Detector(position.shifted),
    Detector(region.region),
    Detector(missing_term.forgotten_number),
    Detector(missing_term.missing_term, needless_after=EXPLAINING),  # it takes the longest
    Detector(missing_term.jacobian_sparsity, last_resort=True),  # it runs a backward for each element
)
"""All detectors, in the order in which they run; the table of causes decides which cause is named."""


def diagnose(observation: Observation) -> Diagnosis:
    """Diagnose a tensor that differs from the right one.

    Args:
        observation: The tensor, the right tensor, and functions that compute both again.

    Example:
        >>> import torch
        >>> right = torch.linspace(1, 2, 6, dtype=torch.float64)
        >>> diagnose(Observation(-right, right)).reason
        'it is the right tensor times -1'
    """
    evidence = Evidence(observation)
    if not observation.same_shape:
        got, right = list(observation.got.shape), list(observation.expected.shape)
        return Diagnosis("shape", f"it has the shape {got}, but the right shape is {right}")
    found: dict[str, Detection] = {}
    for detector in DETECTORS:
        hypotheses = detector.detect(evidence) if detector.applies(observation, found) else ()
        each = evidence.first_fitting(hypotheses)
        if each is not None and (each.cause not in found or (found[each.cause].weak and not each.weak)):
            found[each.cause] = each
    tested = {"fresh inputs": len(evidence.fresh)} if observation.observer is not None else {}
    found = found or {UNKNOWN: unknown(evidence)}
    cause = first_of({name for name, each in found.items() if not each.weak} or set(found))
    others = {other: each.reason for other, each in found.items() if other != cause}
    return Diagnosis(cause, found[cause].reason, others, {**found[cause].evidence, **tested})


def explain_difference(got: Tensor | None, expected: Tensor) -> tuple[str, str]:
    """Name the cause of a difference between two results, and the reason, only from the two tensors.

    Args:
        got: The computed tensor; None if there is none.
        expected: The right tensor; where it is nan or infinite, the computed one must be the same.

    Example:
        >>> explain_difference(torch.tensor([0.0, 1.0]), torch.tensor([torch.nan, 1.0]))[0]
        'nan'
    """
    observation = Observation(got, expected)
    found, evidence = diagnose(observation), Evidence(observation)
    other = precision.not_matched(evidence)
    if other is None:
        return found.cause, found.reason
    if found.cause != "nan" and evidence.first.is_small:  # all finite numbers are right
        return "nan", other.reason
    return found.cause, "; ".join(filter(None, [found.reason, other.reason]))


RESEMBLES = 0.9
"""Minimum correlation at which a tensor is described as proportional to the right tensor."""


def unknown(evidence: Evidence) -> Detection:
    """Describe the position and size of a difference, and the tensors that it resembles."""
    pair = evidence.first
    count, total = int(pair.wrong.sum()), pair.wrong.numel()
    size = pair.relative_error
    measured = {"wrong": f"{count} of {total}", "error": size}
    if pair.is_small:
        words = f"its error is {size:.2g} of the largest element, too small for a diagnosis"
        return Detection(UNKNOWN, words, measured)
    if pair.argument is not None and evidence.everywhere(lambda pair: not bool(pair.expected.any())):
        return Detection(UNKNOWN, CONSTANT, measured)
    found = evidence.first_fitting(_patterns(evidence))
    if found is not None:
        return replace(found, evidence=measured)
    which = "everywhere" if count == total else f"in {count} of {total} elements"
    looks = _correlation(pair)
    words = f"; it is roughly proportional to the right tensor (correlation {looks:.3f})"
    like = words if looks > RESEMBLES and total > 2 else ""  # one element is proportional to any other
    words = f"it is wrong {which}, by up to {size:.2g} of the largest right element{like}"
    return Detection(UNKNOWN, words, measured)


CONSTANT = (
    "the right gradient is zero, because the results do not change with the input. If you mean a different "
    'gradient, such as a straight-through estimator, declare it: `opsmith.adopt(..., kind="surrogate")` for '
    "a class, `.surrogate_gradients(...)` for an operator"
)


def _patterns(evidence: Evidence) -> Iterator[Detection]:
    """Yield descriptions of patterns for which there is no cause."""
    pattern, first = partial(Detection, UNKNOWN), evidence.first
    dims = range(first.expected.dim())
    for words, some in (*((f"dimension {dim}", (dim,)) for dim in dims), ("all dimensions", tuple(dims))):
        words = f"it is the right tensor in the reverse order along {words}"
        yield pattern(words, predicted=partial(_reversed, dims=some))
    if first.got.numel() > 2:
        off = (first.got - first.expected).flatten()[0].item()
        words = f"it is the right tensor plus the same number everywhere ({off:.6g})"
        yield pattern(words, predicted=lambda pair: pair.expected + (pair.got - pair.expected).flatten()[0])
        for source, times in product(values_beside(first), (True, False)):
            factor = scale.steady_factor(evidence, partial(_factor, source=source, times=times))
            if factor is not None:
                words = f"{'multiplied' if times else 'divided'} by {source[0]}"
                words += "" if abs(factor - 1) < SAME else f", and multiplied by {scale.shown_factor(factor)}"
                yield pattern(f"it is the right tensor {words}")
        if not first.got.is_complex():
            yield pattern("it has the right values in another order", predicted=_reordered)


def _reversed(pair: Observation, dims: tuple[int, ...]) -> Tensor:
    return pair.expected.flip(dims)


def _factor(pair: Observation, source: Source, *, times: bool) -> complex | None:
    """Fit the factor between both tensors after one of them is multiplied by the numbers aligned with it."""
    numbers = values_beside(pair).get(source)
    if numbers is None or numbers.dtype == torch.bool or numbers.is_complex() > pair.expected.is_complex():
        return None
    if times:
        return scale.factor_of(replace(pair, right=pair.expected * numbers))
    return scale.factor_of(replace(pair, computed=pair.got * numbers))


def _reordered(pair: Observation) -> Tensor | None:
    actual, right = (each.flatten().sort().values for each in (pair.got, pair.expected))
    return pair.got if all_close(actual, right, float(pair.slack.max())) else None


def _correlation(pair: Observation) -> float:
    sizes = float(pair.got.abs().pow(2).sum().sqrt() * pair.expected.abs().pow(2).sum().sqrt())
    together = float((pair.got.conj() * pair.expected).real.sum())
    return together / sizes if sizes else 0.0
