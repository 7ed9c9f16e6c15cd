"""Diagnosis: run every detector, and name the first detected cause in the order of precedence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.causes import UNKNOWN, first_of
from opsmith.checking.diagnosis.conditions import values_beside
from opsmith.checking.diagnosis.detectors import DETECTORS
from opsmith.checking.diagnosis.detectors.precision import not_matched
from opsmith.checking.diagnosis.detectors.scale import shown_factor
from opsmith.checking.diagnosis.evidence import Detection, Evidence, Pair
from opsmith.checking.diagnosis.observation import Observation
from opsmith.checking.numerics.compare import all_close, largest_magnitude, share_of_largest


@dataclass(frozen=True)
class Diagnosis:
    """Diagnosis of a wrong tensor.

    Args:
        cause: One of `opsmith.checking.causes`.
        reason: Sentence about the tensor as `it`; empty where nothing is known.
        also_fits: Other causes that the evidence confirms, each with its own reason.
        evidence: Measured values.
    """

    cause: str
    reason: str
    also_fits: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    evidence: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


def diagnose(observation: Observation) -> Diagnosis:
    """Diagnose a tensor that differs from the right one.

    Args:
        observation: The tensor, the right one, and functions that compute both again.

    Example:
        >>> import torch
        >>> right = torch.linspace(1, 2, 6, dtype=torch.float64)
        >>> diagnose(Observation(-right, right)).reason
        'it is the right one times -1'
    """
    evidence = Evidence(observation)
    found: dict[str, Detection] = {}
    if not evidence.first.same_shape:
        got, right = list(evidence.first.got.shape), list(evidence.first.expected.shape)
        found["shape"] = Detection("shape", f"it has the shape {got}, and the right one {right}")
    for detector in DETECTORS:
        if not detector.applies(evidence.first, found):
            continue
        for each in detector.detect(evidence):
            if each.cause not in found or (found[each.cause].weak and not each.weak):
                found[each.cause] = each
    tested = {"fresh inputs": len(evidence.fresh)} if observation.redraw is not None else {}
    if not found:
        each = unknown(evidence)
        return Diagnosis(UNKNOWN, each.reason, evidence={**each.evidence, **tested})
    cause = first_of({name for name, each in found.items() if not each.weak} or set(found))
    others = {other: each.reason for other, each in found.items() if other != cause}
    first = found[cause]
    return Diagnosis(cause, first.reason, others, {**first.evidence, **tested})


def explain_difference(got: Tensor | None, expected: Tensor) -> tuple[str, str]:
    """Name the cause of a difference of results, and the reason, from the two tensors alone.

    Args:
        got: The computed tensor; None where there is none.
        expected: The right tensor; where it is nan or infinite, the computed one must be the same.

    Example:
        >>> explain_difference(torch.tensor([0.0, 1.0]), torch.tensor([torch.nan, 1.0]))[0]
        'nan'
    """
    observation = Observation(got, expected)
    found, evidence = diagnose(observation), Evidence(observation)
    other = not_matched(evidence)
    if other is None:
        return found.cause, found.reason
    if found.cause != "nan" and evidence.first.is_small:  # all finite numbers are right
        return "nan", other.reason
    return found.cause, "; ".join(filter(None, [found.reason, other.reason]))


CLOSE = 1e-6
FEW = 3
RESEMBLES = 0.9
"""Correlation from which a tensor is described as proportional to the right one."""


def unknown(evidence: Evidence) -> Detection:
    """Describe the position and size of a difference, and what it resembles."""
    pair = evidence.first
    if not pair.same_shape:
        return Detection(UNKNOWN, "")
    wrong = pair.wrong
    count, total = int(wrong.sum()), wrong.numel()
    size = largest_magnitude(pair.error) / (largest_magnitude(pair.expected) or 1.0)
    measured = {"wrong": f"{count} of {total}", "error": size}
    if pair.is_small:
        words = f"it is off by {size:.2g} of its largest element, too little for a diagnosis"
        return Detection(UNKNOWN, words, measured)
    for words in _patterns(evidence):
        return Detection(UNKNOWN, words, measured)
    which = "everywhere" if count == total else f"in {count} of {total} elements"
    looks = _correlation(pair)
    words = f"; it is roughly proportional to the right one (correlation {looks:.3f})"
    like = words if looks > RESEMBLES else ""
    return Detection(
        UNKNOWN, f"it is wrong {which}, by up to {size:.2g} of the largest right element{like}", measured
    )


def _patterns(evidence: Evidence) -> Iterator[str]:
    """Yield patterns that have no cause of their own, each confirmed by every pair."""
    dims = range(evidence.first.expected.dim())
    if evidence.observation.argument is not None and evidence.everywhere(
        lambda pair: not bool(pair.expected.any())
    ):
        yield CONSTANT
        return
    for words, some in (*((f"dimension {dim}", (dim,)) for dim in dims), ("all dimensions", tuple(dims))):
        if evidence.fits(partial(_reversed, dims=some)):
            yield f"it is the right one in the reverse order along {words}"
    if evidence.everywhere(_constant_off):
        off = (evidence.first.got - evidence.first.expected).flatten()[0].item()
        yield f"it is the right one plus the same number everywhere ({off:.6g})"
    for name, _ in values_beside(evidence.first):
        for words, times in (("once too often", True), ("once too few", False)):
            factor = _factor(evidence.first, name, times=times)
            if factor is not None and evidence.everywhere(
                partial(_has_factor, name=name, times=times, factor=factor)
            ):
                more = "" if abs(factor - 1) < CLOSE else f", and times {shown_factor(factor)}"
                yield f"it is the right one with the factor {name} {words}{more}"
    if evidence.everywhere(_other_order):
        yield "it has the right values in another order"


CONSTANT = (
    "the right one is zero, since the results do not move with the input; where another is meant, as of a "
    'straight-through estimator, declare it: `opsmith.adopt(..., kind="surrogate")` of a class, '
    "`.surrogate_gradients(...)` of an operator"
)


def _reversed(pair: Pair, dims: tuple[int, ...]) -> Tensor:
    return pair.expected.flip(dims)


def _constant_off(pair: Pair) -> bool:
    off = (pair.got - pair.expected).flatten()
    return len(off) > 2 and all_close(off, off[0].expand_as(off), float(pair.slack.max()))


def _sides(pair: Pair, name: str, *, times: bool) -> tuple[Tensor, Tensor] | None:
    """Return both tensors, one of them multiplied by other numbers."""
    aligned = next((each for (known, _), each in values_beside(pair).items() if known == name), None)
    if (
        aligned is None
        or aligned.dtype == torch.bool
        or (aligned.is_complex() and not pair.expected.is_complex())
    ):
        return None
    return (pair.got, pair.expected * aligned) if times else (pair.got * aligned, pair.expected)


def _factor(pair: Pair, name: str, *, times: bool) -> float | None:
    """Fit the factor between both tensors, apart from those numbers."""
    sides = _sides(pair, name, times=times)
    if sides is None or not bool(sides[1].any()):
        return None
    factor = complex((sides[1].conj() * sides[0]).sum() / (sides[1].abs() ** 2).sum())
    return factor.real if factor.real and abs(factor.imag) <= CLOSE * abs(factor) else None


def _has_factor(pair: Pair, name: str, *, times: bool, factor: float) -> bool:
    sides = _sides(pair, name, times=times)
    if sides is None or pair.expected.numel() < FEW:
        return False
    return all_close(sides[0], factor * sides[1], share_of_largest(CLOSE, *sides))


def _other_order(pair: Pair) -> bool:
    if pair.got.is_complex() or pair.got.numel() < 3:
        return False
    actual, right = pair.got.flatten().sort().values, pair.expected.flatten().sort().values
    return all_close(actual, right, float(pair.slack.max()))


def _correlation(pair: Pair) -> float:
    sizes = float(pair.got.abs().pow(2).sum().sqrt() * pair.expected.abs().pow(2).sum().sqrt())
    product = float((pair.got.conj() * pair.expected).real.sum())
    return product / sizes if sizes else 0.0
