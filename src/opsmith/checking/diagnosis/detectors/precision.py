"""Detect a computation in a lower precision than the inputs', and elements that are not finite.

Rounding differs from a slightly wrong formula: either all numbers are numbers of the lower precision, or the
error has the size of its rounding, and changes completely if the inputs are perturbed by a few roundings. The
error of a formula changes only as little as the inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from opsmith.checking.diagnosis.detectors.region import Mask, describe_elements
from opsmith.checking.diagnosis.observation import Detection, Evidence, Observation
from opsmith.checking.numerics.directional import represents
from opsmith.judging.compare import largest_magnitude

LOWER_PRECISIONS = (torch.bfloat16, torch.float16, torch.float32)
NUMBERS = 16
"""Number of values that must be of lower precision and no integers, which every dtype has."""

ROUGH = 0.5
"""Minimum share of the error that must change."""

MOVED = 4.0
"""Perturbation of the inputs, in roundings of the lower precision."""

LITTLE = 0.5
"""A smaller perturbation: rounding errors change nearly as much, a formula's error in proportion."""

LARGEST = 0.125
"""Maximum error that may be rounding, relative to the largest element."""


def precision(evidence: Evidence) -> Iterator[Detection]:
    """Detect numbers of a lower precision, or an error of its size that behaves like rounding."""
    got = evidence.first.computed
    if got is None or not evidence.first.got.isfinite().all():
        return
    for dtype in LOWER_PRECISIONS:
        eps = torch.finfo(dtype).eps
        if eps <= torch.finfo(got.dtype).eps:
            continue
        name = str(dtype).removeprefix("torch.")
        largest = max(pair.relative_error for pair in evidence.pairs)
        if largest > min(64 * eps, LARGEST):
            continue
        if all(represents(dtype, pair.got) for pair in evidence.pairs) and _telling(evidence, dtype):
            words = f"it consists of {name} numbers, so it was computed in {name}"
        elif largest >= eps / 64 and evidence.everywhere(_spread) and _rough(evidence, eps):
            words = (
                f"its error looks like {name} rounding: the error is {largest:.1g} of the largest "
                f"element, and it changes completely if the inputs change by {MOVED * eps:.1g} of "
                "their size"
            )
        else:
            continue
        yield Detection("precision", words, {"error": largest, f"eps of {name}": eps})
        return


def _telling(evidence: Evidence, dtype: torch.dtype) -> bool:
    """Return True if enough right numbers do not exist in the lower precision."""
    right = [pair.expected.real for pair in evidence.pairs]
    digits = sum(int((each.to(dtype).to(each.dtype) != each).sum()) for each in right)
    return digits >= min(NUMBERS, evidence.first.expected.numel())


def _spread(pair: Observation) -> bool:
    """Return True if most elements are wrong, as by rounding, and not only a few."""
    return 2 * int((pair.error > 0).sum()) >= int((pair.expected != 0).sum())


def _rough(evidence: Evidence, eps: float) -> bool:
    changes = _changes(evidence, MOVED * eps)
    if len(changes) < len(SEEDS) or min(changes) <= ROUGH:
        return False
    less = _changes(evidence, LITTLE * eps)
    return max(less, default=0.0) > max(changes) * (2 * LITTLE / MOVED)


SEEDS = (1, 2)


def _changes(evidence: Evidence, step: float) -> list[float]:
    """Compute the share of the error that changes when the inputs are perturbed."""
    moved = [evidence.first.moved(step, seed) for seed in SEEDS]
    off = evidence.first.got - evidence.first.expected
    return [
        largest_magnitude((pair.got - pair.expected) - off) / (largest_magnitude(off) or 1.0)
        for pair in moved
        if pair is not None
    ]


def nonfinite(evidence: Evidence) -> Iterator[Detection]:
    """Detect elements that are not finite, and describe their positions."""
    values = evidence.first.got[_bad(evidence.first)]
    if values.numel():
        count, place = _placed(evidence, _bad)
        where = f"in {count} elements" if len(values) < evidence.first.got.numel() else "everywhere"
        reason = f"it is {_named(values)} {where}" + (f", {place}" if place else "")
        yield Detection("nan", reason, {"elements": count})


def _placed(evidence: Evidence, mask: Mask) -> tuple[str, str | None]:
    """Count the elements of a mask, and describe their positions unless all are set."""
    chosen = mask(evidence.first)
    count, total = int(chosen.sum()), chosen.numel()
    return f"{count} of {total}", None if count == total else describe_elements(evidence, mask)


def not_matched(evidence: Evidence) -> Detection | None:
    """Describe the computed numbers where the right tensor is nan or infinite, if they differ.

    Only for results: a gradient of the reference may be nan where a different gradient is right.
    """
    pair, other = evidence.first, _unmatched(evidence.first)
    if pair.computed is None or not bool(other.any()):
        return None
    got, right = _named(pair.got[other]), _named(pair.expected[other])
    count, place = _placed(evidence, _unmatched)
    reason = f"it is {got} where the right value is {right}, in {count} elements" + (
        f", {place}" if place else ""
    )
    return Detection(
        "nan", f"{reason}; if this is intended, let the reference return the same values", {"elements": count}
    )


def _unmatched(pair: Observation) -> Tensor:
    same = (pair.got == pair.expected) | (pair.got.isnan() & pair.expected.isnan())
    return ~pair.expected.isfinite() & ~same


def _named(values: Tensor) -> str:
    """Name the number that all of some elements equal, or else their kind."""
    if bool(values.isnan().all()):
        return "nan"
    if bool((values == values[0]).all()):
        return f"{values[0].item() + 0:.6g}"  # no -0
    if bool(values.isfinite().all()):
        return "finite"
    return "nan or infinite" if bool(values.isnan().any()) else "infinite"


def _bad(pair: Observation) -> Tensor:
    return ~pair.got.isfinite() & pair.expected.isfinite()
