"""A wrong tensor beside the right one, and what is known of how both came about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from opsmith.checking.diagnosis.detectors.paths import Paths

Grads = Sequence[Tensor | None]
"""What comes in for each result, None where nothing does."""

MORE = 8
"""How many further fresh inputs narrow down a condition."""


@dataclass(frozen=True)
class Observation:
    """A tensor that came, the right one, and what they were computed from.

    Only the first two are needed; every other field lets more hypotheses be tested.

    Args:
        got: What came; None where nothing came.
        expected: What is right, in float64 or complex128, of the same shape unless the shape is the fault.
        what: How a message calls it.
        about: Label of the input whose gradient it is; None for a result or a tangent.
        inputs: The flat inputs, by label.
        grads: What came in for each visible result, by its name.
        results: The visible results, by name, in float64.
        others: Gives the gradients of the other inputs, each as what came and what is right.
        backward: Gives what comes for other incoming gradients, on the same inputs.
        right: Gives what is right for other incoming gradients, on the same inputs.
        right_at: Gives what is right for the same incoming gradients, where some inputs are others.
        paths: Gives the ways through the reference that the right one is a sum over.
        near: The same where every number has moved by so much of itself, for a seed.
        tolerance: How far each element may be off.
        again: The same on fresh inputs of the same shapes and with fresh incoming gradients, for a seed; None
            where there is nothing that can be drawn anew.
        elsewhere: Gives the same at other sizes, each for a seed.
        fresh: On how many fresh inputs a guess must hold.
        more: How many further ones may be drawn to narrow down a condition.
    """

    got: Tensor | None
    expected: Tensor
    what: str = "it"
    about: str | None = None
    inputs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    grads: Mapping[str, Tensor | None] = field(default_factory=lambda: MappingProxyType({}))
    results: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))
    others: Callable[[], Mapping[str, tuple[Tensor | None, Tensor]]] | None = None
    backward: Callable[[Grads], Tensor | None] | None = None
    right: Callable[[Grads], Tensor] | None = None
    right_at: Callable[[Mapping[str, Any]], Tensor | None] | None = None
    paths: Callable[[], Paths | None] | None = None
    near: Callable[[float, int], Observation | None] | None = None
    tolerance: Tensor | None = None
    again: Callable[[int], Observation | None] | None = None
    elsewhere: Callable[[], Sequence[Callable[[int], Observation | None]]] | None = None
    fresh: int = 3
    more: int = MORE
