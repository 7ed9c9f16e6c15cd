"""The diagnosis: every hypothesis is asked, and the first cause in the order of precedence names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor

from opsmith.checking.causes import UNKNOWN, first_of
from opsmith.checking.diagnosis.detectors.grad_output import incoming, influence
from opsmith.checking.diagnosis.detectors.missing_term import forgotten_number, missing, missing_term
from opsmith.checking.diagnosis.detectors.per_index_scale import own_factors
from opsmith.checking.diagnosis.detectors.position import shifted, swapped, transposed
from opsmith.checking.diagnosis.detectors.precision import nonfinite, precision
from opsmith.checking.diagnosis.detectors.scale import scale
from opsmith.checking.diagnosis.detectors.sign import sign
from opsmith.checking.diagnosis.detectors.summation import broadcast
from opsmith.checking.diagnosis.detectors.unknown import unknown
from opsmith.checking.diagnosis.hypothesis import Found, Hypothesis, Seen
from opsmith.checking.diagnosis.observation import Observation
from opsmith.checking.diagnosis.region import region

HYPOTHESES: tuple[Hypothesis, ...] = (
    broadcast,
    missing,
    nonfinite,
    incoming,
    precision,
    sign,
    scale,
    own_factors,
    swapped,
    transposed,
    shifted,
    region,
    forgotten_number,
    missing_term,
    influence,
)
"""In the order of precedence of the causes that they are about."""

OF_ANY_SIZE = (missing, nonfinite, incoming, precision)
"""Those that say something of a difference as small as rounding, too."""

OF_ANY_SHAPE = (broadcast, swapped, transposed)
"""Those that say something of a tensor of another shape, too."""


ENOUGH = frozenset(
    {"nan", "missing-gradient", "ignores-grad-output", "nonlinear-grad", "precision", "transposed", "shifted"}
)
"""Causes beside which a term of the reference says nothing, and it takes the longest to look for."""


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a tensor.

    Args:
        cause: One of `opsmith.checking.causes`.
        reason: What says it, about the tensor as `it`; empty where nothing can be said.
        also_fits: Other causes that the evidence bears out, each with its own reason.
        evidence: What was measured.
    """

    cause: str
    reason: str
    also_fits: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    evidence: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


def diagnose(observation: Observation) -> Diagnosis:
    """Say what is wrong with a tensor that is not the right one.

    Args:
        observation: The tensor, the right one, and whatever is known of how they came about.

    Example:
        >>> import torch
        >>> right = torch.linspace(1, 2, 6, dtype=torch.float64)
        >>> diagnose(Observation(-right, right)).reason
        'it is the right one times -1'
    """
    seen = Seen(observation)
    found: dict[str, Found] = {}
    asked = HYPOTHESES
    if not seen.first.same_shape:
        asked = OF_ANY_SHAPE
        got, right = list(seen.first.mine.shape), list(seen.first.right.shape)
        found["shape"] = Found("shape", f"it has the shape {got}, and the right one {right}")
    elif seen.first.near:
        asked = OF_ANY_SIZE
    for hypothesis in asked:
        if hypothesis is missing_term and ENOUGH & set(found):
            continue
        if hypothesis is influence and not all(each.weak for each in found.values()):
            continue  # it takes a backward for each element
        for each in hypothesis(seen):
            if each.cause not in found or (found[each.cause].weak and not each.weak):
                found[each.cause] = each
    tested = {"fresh inputs": len(seen.fresh)} if observation.again is not None else {}
    if not found:
        each = unknown(seen)
        return Diagnosis(UNKNOWN, each.reason, evidence={**each.evidence, **tested})
    cause = first_of({name for name, each in found.items() if not each.weak} or set(found))
    others = {other: each.reason for other, each in found.items() if other != cause}
    first = found[cause]
    return Diagnosis(cause, first.reason, others, {**first.evidence, **tested})


def explain_difference(got: Tensor | None, expected: Tensor) -> tuple[str, str]:
    """The cause of a difference and what says it, from the two tensors alone.

    Args:
        got: What came; None where nothing came.
        expected: What is right.
    """
    found = diagnose(Observation(got, expected))
    return found.cause, found.reason
