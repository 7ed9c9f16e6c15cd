"""Derivatives that autograd computes by some inputs of a sample, compared with finite differences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from opsmith.checking.calls import computed_in, differentiated
from opsmith.checking.exceptions import first_line, raised_within
from opsmith.checking.numerics.autodiff import Results
from opsmith.checking.numerics.directional import PackedTensors
from opsmith.checking.numerics.finite_differences import Claim
from opsmith.checking.property import Findings, Skipped
from opsmith.checking.report import Failure
from opsmith.checking.run import Coverage, Run, covered_runs
from opsmith.checking.subject import Subject
from opsmith.judging.answer import Answer, Computation, Function, unknown
from opsmith.judging.judge import judge
from opsmith.torch_library.torch_messages import NO_DERIVATIVE, has_message

SHARE = 64
"""Divisor of the number of elements moved one at a time, for a function that is a derivative itself."""


class Derivatives(Run):
    """Derivatives by some inputs of a sample, in float64."""

    @property
    def labels(self) -> str:
        """Names of the inputs in messages."""
        return ", ".join(self.sample.labels[argnum] for argnum in self.argnums)

    def results_at(self, flat: Sequence[Any]) -> list[Any]:
        """The results as numbers on the CPU, computed on the device from numbers on the CPU."""
        return self.subject.call(self.sample, flat, self.device)

    def claim(
        self,
        function: Results,
        packed: PackedTensors,
        weights: Sequence[Tensor | None],
        got: Mapping[int, Tensor | None],
    ) -> Claim:
        """Derivatives of a function that is itself a derivative.

        Fewer elements are moved, because each move costs more than a call, and a wrong derivative is rarely
        wrong in only one element.
        """
        elements = max(1, self.subject.effort.moved(self.sample.elements) // SHARE)
        return Claim(function, packed, weights, got, elements, self.subject.generator)

    def answers(self, function: Function, flat: list[Any]) -> tuple[Answer, ...]:
        """The results of a function, with the rounding bounds of the dtype in which the operator computes."""
        known = partial(computed_in, self.subject, self.sample)
        found = Computation.of(function, flat, self.subject.generator(), computed_in=known, usual=unknown)
        return found.at(found.wide, torch.float64)


D = TypeVar("D", bound=Derivatives)


def each_subset(
    name: str, kind: type[D], check: Callable[[D, D | None], Findings], subject: Subject
) -> Findings:
    """Run a function on every sample, by all inputs together and by each alone.

    A refused derivative (a formula declared as not implemented, an operation without forward mode, a backward
    marked with `once_differentiable`) is not a failure; its reason is reported.

    Args:
        name: Name of the property.
        kind: The derivatives.
        check: Function that takes the derivatives by some inputs and, if these inputs are among those found
            right together, the derivatives by all of these. It yields `Skipped` with the reason if it
            compares nothing, which is not a pass.
        subject: The subject of the check.
    """

    def each(run: Run, coverage: Coverage) -> Findings:
        inputs, refused = differentiated(subject, run.sample), coverage.refused
        refused.update(dict.fromkeys(inputs.refused.values()))
        right: tuple[int, ...] = ()
        for subset in reversed([*inputs.subsets()]):
            known = right if {*subset} <= {*right} else ()  # all together may be refused
            places = subject.devices_with(torch.float64)
            alone = [kind(subject, run.sample, name, device, torch.float64, subset) for device in places]
            try:
                found = [
                    finding
                    for one in alone
                    for finding in check(one, replace(one, by=known) if known else None)
                ]
            except Exception as error:
                if not refuses(error):
                    raise
                refused[first_line(error)] = None
                continue
            reasons = [finding.reason for finding in found if isinstance(finding, Skipped)]
            refused.update(dict.fromkeys(reasons))
            coverage.ran += not (reasons or known)  # a comparison with `known` alone does not count
            yield from (finding for finding in found if not isinstance(finding, Skipped))
            if any(isinstance(finding, Failure) for finding in found):
                return  # the other subsets of this sample would report the same fault
            right = right or subset

    yield from covered_runs(name, each, "there is nothing to differentiate", subject)


def refuses(error: Exception) -> bool:
    """True if an exception refuses a derivative on purpose."""
    by_torch = isinstance(error, RuntimeError) and has_message(error, NO_DERIVATIVE)
    return (by_torch and not raised_within(error)) or isinstance(error, NotImplementedError)


def agrees(got: Answer, right: Answer) -> bool:
    """True if two computations of a value agree to half of the digits, or to the rounding of either."""
    verdicts = (judge(one.tensor, other) for one, other in ((got, right), (right, got)))
    return any(not verdict.wrong or verdict.minor for verdict in verdicts)


def apart(alone: Sequence[Answer], together: Sequence[Answer]) -> Iterator[tuple[int, str]]:
    """Yield the positions at which two computations of the same values disagree, with the differences."""
    for at, (got, right) in enumerate(zip(alone, together, strict=True)):
        if got.value is not None and right.value is not None and not agrees(got, right):
            yield at, f"the difference is {float((got.value - right.value).abs().nan_to_num(0.0).max()):.3g}"
