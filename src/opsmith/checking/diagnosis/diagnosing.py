"""The diagnosis: every hypothesis is asked, and the first cause in the order of precedence names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from opsmith.checking.causes import UNKNOWN, first_of
from opsmith.checking.diagnosis.broadcast import broadcast
from opsmith.checking.diagnosis.found import Found, Hypothesis
from opsmith.checking.diagnosis.incoming import incoming
from opsmith.checking.diagnosis.missing import missing
from opsmith.checking.diagnosis.missing_term import missing_term
from opsmith.checking.diagnosis.nonfinite import nonfinite
from opsmith.checking.diagnosis.observation import Observation
from opsmith.checking.diagnosis.precision import precision
from opsmith.checking.diagnosis.region import region
from opsmith.checking.diagnosis.scale import scale
from opsmith.checking.diagnosis.seen import Seen
from opsmith.checking.diagnosis.shifted import shifted
from opsmith.checking.diagnosis.sign import sign
from opsmith.checking.diagnosis.swapped import swapped
from opsmith.checking.diagnosis.transposed import transposed
from opsmith.checking.diagnosis.unknown import unknown

HYPOTHESES: tuple[Hypothesis, ...] = (
    broadcast,
    missing,
    nonfinite,
    incoming,
    precision,
    sign,
    scale,
    swapped,
    transposed,
    shifted,
    region,
    missing_term,
)
"""In the order of precedence of the causes that they are about."""

OF_ANY_SIZE = (missing, nonfinite, incoming, precision)
"""Those that say something of a difference as small as rounding, too."""


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a tensor.

    Args:
        cause: One of `opsmith.checking.causes`.
        reason: A sentence that says it, which names the tensor; empty where nothing can be said.
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
        >>> diagnose(Observation(-right, right, what="the gradient of `x`")).reason
        'the gradient of `x` is the right one times -1'
    """
    seen = Seen(observation)
    small = seen.first.same_shape and seen.first.near
    found: dict[str, Found] = {}
    for hypothesis in OF_ANY_SIZE if small else HYPOTHESES:
        for each in hypothesis(seen):
            found.setdefault(each.cause, each)
    tested = {"fresh inputs": len(seen.fresh)} if observation.again is not None else {}
    if not found:
        each = unknown(seen)
        return Diagnosis(UNKNOWN, _named(observation, each.reason), evidence={**each.evidence, **tested})
    cause = first_of(set(found))
    others = {other: each.reason for other, each in found.items() if other != cause}
    first = found[cause]
    return Diagnosis(cause, _named(observation, first.reason), others, {**first.evidence, **tested})


def _named(observation: Observation, reason: str) -> str:
    """The reason, which speaks of `it`, with the tensor's name."""
    return observation.what + reason.removeprefix("it") if reason.startswith("it ") else reason
