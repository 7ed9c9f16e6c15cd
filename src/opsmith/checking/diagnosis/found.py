"""What a hypothesis answers where the evidence bears it out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from opsmith.checking.diagnosis.seen import Seen


@dataclass(frozen=True)
class Found:
    """A cause that the evidence bears out.

    Args:
        cause: One of `opsmith.checking.causes`.
        reason: A sentence that says it, without a capital letter and a full stop.
        evidence: What was measured.
        weak: Whether it is only one way to see what another cause, if one is borne out, says better.
    """

    cause: str
    reason: str
    evidence: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    weak: bool = False


Hypothesis = Callable[[Seen], Iterator[Found]]
"""Proposes on the first pair, tests on all, and yields what holds."""
