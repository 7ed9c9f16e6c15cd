"""The diagnosis: every hypothesis is asked, and the first in the order of precedence names the failure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from opsmith.checking.diagnosis.observation import Observation
from opsmith.checking.hypotheses import explain_difference


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a tensor.

    Args:
        cause: One of `opsmith.checking.causes`.
        reason: A sentence that says it; empty where nothing can be said.
        also_fits: Other causes that the evidence bears out, each with its own reason.
        evidence: What was measured.
    """

    cause: str
    reason: str
    also_fits: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    evidence: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


def diagnose(observation: Observation) -> Diagnosis:
    """Say what is wrong with a tensor that is not the right one.

    Example:
        >>> import torch
        >>> right = torch.linspace(1, 2, 6, dtype=torch.float64)
        >>> diagnose(Observation(-right, right)).cause
        'sign'
    """
    expected = observation.expected.detach().cpu()
    got = None if observation.got is None else observation.got.detach().cpu()
    if got is not None and got.shape != expected.shape:
        return Diagnosis("shape", f"its shape is {list(got.shape)} where {list(expected.shape)} is right")
    cause, reason = explain_difference(got, expected)
    renamed = {"conjugate": "sign", "permuted": "unknown"}
    return Diagnosis(renamed.get(cause, cause), reason)
