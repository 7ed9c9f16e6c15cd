"""Derivatives that autograd computes by some inputs of a sample, to be held to differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import computed_in, rule_location
from opsmith.checking.numerics.agreement import Claim
from opsmith.checking.numerics.autodiff import Results
from opsmith.checking.numerics.directional import PackedTensors
from opsmith.checking.report import Failure
from opsmith.checking.samples.cases import case_name
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.judging.answer import Answer, Computation, Function, unknown
from opsmith.judging.judge import judge

SHARE = 64
"""Divisor of the number of elements that are moved one at a time, for a function that is a derivative."""


@dataclass(frozen=True)
class Derivatives:
    """Derivatives by some inputs of a sample, in float64.

    Args:
        name: Name of the property that looks at them.
        subject: The subject of the check.
        sample: The sample.
        argnums: The inputs.
        device: The device that the operator runs on.
    """

    name: str
    subject: Subject
    sample: Sample
    argnums: tuple[int, ...]
    device: torch.device

    @property
    def labels(self) -> str:
        """Names of the inputs in messages."""
        return ", ".join(self.sample.labels[argnum] for argnum in self.argnums)

    def call(self, flat: Sequence[Any]) -> list[Any]:
        """The results on the device, of numbers on the CPU, as numbers on the CPU."""
        return self.subject.call(self.sample, flat, self.device)

    def computed_in(self) -> torch.dtype:
        """The dtype that the operator computes in."""
        return computed_in(self.subject, self.sample)

    def second_order(
        self,
        function: Results,
        packed: PackedTensors,
        weights: Sequence[Tensor | None],
        got: Mapping[int, Tensor | None],
    ) -> Claim:
        """Derivatives of a function that is a derivative itself.

        It costs more than a call, and one that is wrong is rarely wrong in one element only.
        """
        elements = max(1, self.subject.effort.moved(self.sample.elements) // SHARE)
        return Claim(function, packed, weights, got, elements, self.subject.generator)

    def answers(self, function: Function, flat: list[Any]) -> tuple[Answer, ...]:
        """The results of a function, right to the rounding of the dtype that the operator computes in."""
        generator = self.subject.generator()
        found = Computation.of(function, flat, generator, computed_in=self.computed_in, usual=unknown)
        return found.at(found.wide, torch.float64)

    def failure(
        self, cause: str, message: str, evidence: Mapping[str, Any], where: str | None = None
    ) -> Failure:
        """A failure by these inputs; by default at what computes the gradient of the first."""
        case = case_name(self.sample, torch.float64, self.device)
        where = where or rule_location(self.subject, self.sample.names[self.argnums[0]])
        return Failure(self.name, self.labels, cause, message, where, {"sample": case, **evidence})


def agrees(got: Answer, right: Answer) -> bool:
    """True if two ways to compute one thing agree to half of the digits, or to the rounding of either."""
    for one, other in ((got, right), (right, got)):
        assert one.value is not None
        verdict = judge(one.value, other)
        if not verdict.wrong or verdict.minor:
            return True
    return False


def apart(alone: Sequence[Answer], together: Sequence[Answer]) -> Iterator[tuple[int, str]]:
    """Yield the positions at which two ways to compute the same things do not agree, and by how much."""
    for at, (got, right) in enumerate(zip(alone, together, strict=True)):
        if got.value is not None and right.value is not None and not agrees(got, right):
            yield at, f"they differ by {float((got.value - right.value).abs().nan_to_num(0.0).max()):.3g}"
