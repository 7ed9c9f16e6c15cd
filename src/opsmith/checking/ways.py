"""Ways to ask for the same outputs, and one driver that compares what each gives with what is right.

An output is a result or a gradient. It may be asked for in another layout of memory, by another method of
autograd, or with other parameters frozen: it must stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import Overlooking, error_words, refuse_own
from opsmith.checking.property import Findings, innermost
from opsmith.checking.report import Failure
from opsmith.checking.run import Run, TensorName
from opsmith.checking.samples.batches import replicas
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.checking.subject import PERTURBATIONS, Subject
from opsmith.core.cached_property import cached_property
from opsmith.judging.answer import Answer, Computation
from opsmith.judging.compare import (
    Difference,
    agree_to_share,
    differ_beyond_rounding,
    exact_difference,
    form_difference,
)
from opsmith.judging.judge import judge
from opsmith.judging.tensors import CPU, is_inexact, perturbed, replica

Outputs = Sequence[Tensor | None]


@dataclass(frozen=True, eq=False)
class Way:
    """A way to ask for some outputs, which must be the right ones.

    Args:
        name: Its name in lists.
        outputs: Names of the outputs, the results first.
        ask: Gives the outputs; None where there are none to compare.
        fault: Gives the difference of an output, by its position, from the right one; None if it is right.
        conclude: Makes the failure for a fault.
        about: The thing that it changes: one failure stands for all ways that change the same.
        since: The first output that counts.
        excused: Notes an exception that is no fault, and returns True.
        blamed: Gives the position of the output that another exception is about.
    """

    name: str
    outputs: Sequence[TensorName]
    ask: Callable[[], Outputs | None]
    fault: Callable[[int, Tensor | None], Difference | None]
    conclude: Callable[[Fault], Failure]
    about: Hashable = None
    since: int = 0
    excused: Callable[[Exception], bool] = lambda error: False
    blamed: Callable[[Exception], int | None] = lambda error: None

    @cached_property
    def faults(self) -> list[Fault] | None:
        """All that is wrong; None where there are no outputs to compare."""
        try:
            with without_warnings():
                outputs = self.ask()
        except Exception as error:
            refuse_own(error)
            if self.excused(error):
                return None
            return [Fault(self, self.blamed(error), error=error)]
        if outputs is None:
            return None
        found: list[Fault] = []
        for position, (named, output) in enumerate(zip(self.outputs, outputs, strict=True)):
            difference = self.fault(position, output) if position >= self.since else None
            if difference is not None:
                found.append(Fault(self, position, difference))
                if named.kind == "result":
                    break  # a gradient of a wrong result would report the same
        return found


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with one way: an output, or an exception.

    Args:
        way: The way.
        output: Position of the output; None for an exception that is about none.
        difference: Difference of the output from the right one.
        error: The exception.
    """

    way: Way
    output: int | None
    difference: Difference | None = None
    error: Exception | None = None

    @property
    def named(self) -> TensorName:
        """The output, or the first one for an exception that is about none."""
        return self.way.outputs[self.output or 0]

    def __str__(self) -> str:
        return str(self.difference) if self.error is None else error_words(self.error)


def compare(ways: Iterable[Way]) -> Findings:
    """One failure for each output that is wrong, with the ways in which it is wrong and right.

    Args:
        ways: The ways; each is asked before the next one is made.
    """
    wrong: dict[tuple[Hashable, int | None], list[Fault]] = {}
    right: dict[Hashable, list[str]] = {}
    for way in ways:
        for fault in way.faults or ():
            wrong.setdefault((way.about, fault.output), []).append(fault)
        if way.faults == []:
            right.setdefault(way.about, []).append(way.name)
    for (about, _), faults in wrong.items():
        failure = faults[0].way.conclude(faults[0])
        listed = {"wrong for": [each.way.name for each in faults], "right for": right.get(about, ())}
        words = {key: ", ".join(names) for key, names in listed.items() if names}
        yield replace(failure, evidence={**failure.evidence, **words})


def another_output(
    property: str,
    run: Run,
    when: str,
    cause: str,
    fault: Fault,
    /,
    *,
    differs: str = "is another one",
    raises: str = ", it raises",
    error: str = "raises",
    hint: str = "",
) -> Failure:
    """The usual failure of a way: an output is another one, or there is an exception.

    Args:
        property: Name of the property.
        run: The run.
        when: The way, in words.
        cause: Cause of another output.
        fault: What is wrong.
        differs: Words between the output and the way.
        raises: Words between the way and an exception.
        error: Cause of an exception.
        hint: End of the message.
    """
    named, evidence = fault.named, {"sample": str(run.sample)}
    if fault.error is None:
        message = f"{named} {differs} {when}: {fault}{hint}"
        return Failure(property, named.name, cause, message, named.where, evidence)
    where = innermost(
        fault.error, run.backward_location() if run.argnums else run.subject.specification.where
    )
    message = f"{when}{raises} {fault}; else it does not{hint}"
    return Failure(property, None, error, message, where, evidence)


def differs_from(right: Outputs, position: int, got: Tensor | None) -> Difference | None:
    """The difference of an output from that of another run, beyond rounding; None where they are alike."""
    expected = right[position]
    form = form_difference(got, expected)
    if got is None or expected is None or form is not None or not differ_beyond_rounding(expected, got):
        return form
    return exact_difference(got, expected)


PERTURBATION = 2.0**-30
"""Relative perturbation of inputs: more than rounding."""

REPEATS = 2
"""Repeated runs of what is right, before anything is compared with it."""


@dataclass
class RightOutputs:
    """Outputs of a run that are right, with a bound of their rounding; or the exception of the run.

    Args:
        function: Gives the outputs for some values.
        values: The values.
        results: Number of outputs that are results; of the others, gradients, None stands beside zeros.
        subject: The subject of the check.
    """

    function: Callable[[list[Any]], Outputs]
    values: list[Any]
    results: int
    subject: Subject
    outputs: Outputs = ()
    error: Exception | None = None

    def __post_init__(self) -> None:
        own = (each.dtype.to_real() for each in self.values if is_inexact(each))
        self.dtype = next(own, torch.float64)
        try:
            self.outputs = self.function(replicas(self.values))
        except Exception as error:
            refuse_own(error)
            self.error = error

    def fault(self, position: int, got: Tensor | None) -> Difference | None:
        """The difference of an output from the right one; None where it is right."""
        expected = self.outputs[position]
        form = form_difference(got, expected)
        if got is None or expected is None:
            present = expected if got is None else got
            is_zero = present is not None and position >= self.results and not present.any()
            return None if is_zero else form
        if form is not None or exact_difference(got, expected) is None:
            return form
        difference = judge(got, self._answer(position)).difference
        decided = difference is not None and self._is_settled(position) and self._is_steady(position)
        return difference if decided else None

    def _answer(self, position: int) -> Answer:
        """The output as the right one; other properties judge it."""
        expected = self.outputs[position]
        if self._computation is not None:
            return self._computation.twin(position, expected, self.dtype)
        wide = replica(expected, torch.float64, CPU)
        summands = max(value.numel() for value in self.values if isinstance(value, Tensor))
        return Answer(wide, expected, self.dtype, None, summands=summands)

    @cached_property
    def _computation(self) -> Computation | None:
        """The operator's own run in float64, which measures rounding; None where it does not run there."""
        subject = self.subject
        try:
            return Computation.of(
                self.function, self.values, subject.generator(), has_truth=subject.has_truth
            )
        except (RuntimeError, TypeError) as error:  # as of a class that takes one dtype alone
            refuse_own(error)
            return None

    def _is_settled(self, position: int) -> bool:
        """True if the output stays under perturbed inputs: at a tie, each of several outputs is right."""
        step = PERTURBATION if self.dtype == torch.float64 else 2.0**-14
        expected, other = self.outputs[position], self._again(position, step)
        if expected is None or other is None:
            return False
        if not is_inexact(expected):
            return torch.equal(other, expected)
        finite = expected.isfinite() & other.isfinite()
        return agree_to_share(
            torch.where(finite, other, 0), torch.where(finite, expected, 0), step**0.5
        ) and torch.equal(expected.isfinite(), other.isfinite())

    def _is_steady(self, position: int) -> bool:
        """True if repeated runs agree; otherwise what was changed is not the reason."""
        expected = self.outputs[position]
        others = [self._again(position) for _ in range(REPEATS)]
        return expected is not None and all(
            other is not None
            and (exact_difference(other, expected) is None or not judge(other, self._answer(position)).wrong)
            for other in others
        )

    def _again(self, position: int, step: float = 0.0) -> Tensor | None:
        """The output of one more run, at perturbed values; None if it raises, or has another shape."""
        generator, expected = self.subject.generator(PERTURBATIONS), self.outputs[position]
        with Overlooking():
            other = self.function([perturbed(each, step, generator) for each in replicas(self.values)])[
                position
            ]
            alike = other is not None and expected is not None and other.shape == expected.shape
            return other if alike else None
        return None
