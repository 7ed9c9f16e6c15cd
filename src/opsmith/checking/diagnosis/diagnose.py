"""Diagnosis: run every detector, and name the first detected cause in the order of precedence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor

from opsmith.checking.causes import UNKNOWN, first_of
from opsmith.checking.diagnosis.comparison import Detection, Evidence
from opsmith.checking.diagnosis.detectors import DETECTORS
from opsmith.checking.diagnosis.detectors.unknown import unknown
from opsmith.checking.diagnosis.observation import Observation


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
    """Name the cause of a difference, and the reason, from the two tensors alone.

    Args:
        got: The computed tensor; None where there is none.
        expected: The right tensor.
    """
    found = diagnose(Observation(got, expected))
    return found.cause, found.reason
