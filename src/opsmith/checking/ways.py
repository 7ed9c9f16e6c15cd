"""Ways to compute the same outputs, and one driver that compares each way's outputs with the right outputs.

An output is a result or a gradient. It may be computed in a different memory layout, by a different method of
autograd, with different parameters frozen, or in a different form (mapped, compiled, under autocast). It must
stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import computed_in
from opsmith.checking.exceptions import Overlooking, Raised, attempt, error_words
from opsmith.checking.numerics.autodiff import vjp_or_zeros
from opsmith.checking.property import Findings
from opsmith.checking.report import Failure
from opsmith.checking.run import Run, TensorName
from opsmith.checking.samples.batches import batched, own_dtype, replicas
from opsmith.checking.subject import PERTURBATIONS, Subject
from opsmith.core.cached_property import cached_property
from opsmith.core.location import innermost
from opsmith.judging.answer import Answer, Computation
from opsmith.judging.compare import (
    Difference,
    differ_beyond_rounding,
    exact_difference,
    form_difference,
    within_rounding,
)
from opsmith.judging.judge import judge
from opsmith.judging.tensors import CPU, is_inexact, perturbed, replica

Outputs = Sequence[Tensor | None]


@dataclass(frozen=True, eq=False)
class Way:
    """A way to compute some outputs, with the test that they are right.

    Args:
        name: Name of the way in lists.
        outputs: Names of the outputs; results come first.
        ask: Returns the outputs; None if there are none to compare.
        fault: Returns the difference between an output, given by position, and the right output; None if it
            is right.
        conclude: Makes the failure for a fault.
        about: The thing that the way changes; ways that change the same thing share one failure.
        since: Position of the first output that counts.
        excused: Notes an exception that is no fault, and returns True.
        blamed: Returns the position of the output that any other exception concerns.
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
        """All faults; None if there are no outputs to compare."""
        outputs = attempt(self.ask)
        if isinstance(outputs, Raised):
            error = outputs.error
            return None if self.excused(error) else [Fault(self, self.blamed(error), error=error)]
        if outputs is None:
            return None
        found: list[Fault] = []
        for position, (named, output) in enumerate(zip(self.outputs, outputs, strict=True)):
            difference = self.fault(position, output) if position >= self.since else None
            if difference is not None:
                found.append(Fault(self, position, difference))
                if named.kind == "result":
                    break  # the gradient of a wrong result would report the same fault
        return found


@dataclass(frozen=True)
class Fault:
    """One fault of one way: a wrong output, or an exception.

    Args:
        way: The way.
        output: Position of the output; None for an exception that concerns no output.
        difference: Difference between the output and the right output.
        error: The exception.
    """

    way: Way
    output: int | None
    difference: Difference | None = None
    error: Exception | None = None

    @property
    def named(self) -> TensorName:
        """The output, or the first output for an exception that concerns no output."""
        return self.way.outputs[self.output or 0]

    def __str__(self) -> str:
        return str(self.difference) if self.error is None else error_words(self.error)


def compare(ways: Iterable[Way]) -> Findings:
    """One failure for each wrong output, with the ways in which it is wrong and right.

    Args:
        ways: The ways; each is run before the next is made.
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
    differs: str = "differs",
    raises: str = ", the call raises",
    error: str = "raises",
    hint: str = "",
) -> Failure:
    """The usual failure of a way: an output that differs, or an exception.

    Args:
        property: Name of the property.
        run: The run.
        when: The way, in words.
        cause: Cause of an output that differs.
        fault: The fault.
        differs: Text between the output and the way.
        raises: Text between the way and an exception.
        error: Cause of an exception.
        hint: End of the message.
    """
    run, named = replace(run, name=property), fault.named
    if fault.error is None:
        return run.failure(named.name, cause, f"{named} {differs} {when}: {fault}{hint}", named.where)
    where = run.backward_location() if run.argnums else run.subject.specification.where
    message = f"{when}{raises} {fault}; otherwise there is no error{hint}"
    return run.failure(None, error, message, innermost(fault.error, where))


def differs_from(right: Outputs, position: int, got: Tensor | None) -> Difference | None:
    """The difference between an output and another run's, beyond rounding; None if they agree."""
    expected = right[position]
    form = form_difference(got, expected)
    if got is None or expected is None or form is not None or not differ_beyond_rounding(expected, got):
        return form
    return exact_difference(got, expected)


PERTURBATION = 2.0**-30
"""Relative perturbation of inputs: more than rounding."""

REPEATS = 2
"""Repeated runs of the right computation, before anything is compared with it."""


@dataclass
class Twin:
    """A run whose outputs another run must reproduce, with a bound of their rounding; or its exception.

    Args:
        function: Returns the outputs for some values.
        values: The values.
        results: Number of outputs that are results; the rest are gradients, for which None equals zeros.
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
        found = attempt(lambda: self.function(replicas(self.values)))
        if isinstance(found, Raised):
            self.error = found.error
        else:
            self.outputs = found

    def fault(self, position: int, got: Tensor | None) -> Difference | None:
        """The difference between an output and the right output; None if it is right."""
        expected = self.outputs[position]
        form = form_difference(got, expected)
        if got is None or expected is None:
            present = expected if got is None else got
            is_zero = present is not None and position >= self.results and not present.any()
            return None if is_zero else form
        if form is not None or exact_difference(got, expected) is None:
            return form
        difference = judge(got, self._answer(position)).difference
        return difference if difference is not None and self._is_steady(position, expected) else None

    def _answer(self, position: int) -> Answer:
        """The output of this run, taken as right; other properties judge it."""
        expected = self.outputs[position]
        if self._computation is not None:
            return self._computation.twin(position, expected, self.dtype)
        wide = replica(expected, torch.float64, CPU)
        summands = max(value.numel() for value in self.values if isinstance(value, Tensor))
        return Answer(wide, expected, self.dtype, None, summands=summands)

    @cached_property
    def _computation(self) -> Computation | None:
        """The operator's own run in float64, which measures rounding; None if it does not run in float64."""
        own, truth = self.subject.generator(), self.subject.has_truth
        made = attempt(lambda: Computation.of(self.function, self.values, own, has_truth=truth))
        return None if isinstance(made, Raised) else made  # such as a class that takes only one dtype

    def _is_steady(self, position: int, expected: Tensor) -> bool:
        """True if an output stays the same in repeated runs, and almost the same for perturbed inputs.

        Otherwise the changed way is not the reason for a difference: at a tie, several outputs are right.
        """
        step = PERTURBATION if self.dtype == torch.float64 else 2.0**-14
        moved, *repeated = (self._again(position, each) for each in (step, *[0.0] * REPEATS))
        if moved is None or not all(
            each is not None
            and (exact_difference(each, expected) is None or not judge(each, self._answer(position)).wrong)
            for each in repeated
        ):
            return False
        if not is_inexact(expected):
            return torch.equal(moved, expected)
        finite = expected.isfinite() & moved.isfinite()
        one, other = (torch.where(finite, each, 0) for each in (moved, expected))
        return torch.equal(expected.isfinite(), moved.isfinite()) and within_rounding(one, other, step**0.5)

    def _again(self, position: int, step: float = 0.0) -> Tensor | None:
        """The output of one more run, at perturbed values; None if it raises, or if its shape differs."""
        generator, expected = self.subject.generator(PERTURBATIONS), self.outputs[position]
        with Overlooking():
            values = [perturbed(each, step, generator) for each in replicas(self.values)]
            other = self.function(values)[position]
            alike = other is not None and expected is not None and other.shape == expected.shape
            return other if alike else None
        return None


CAUSES_OF_ASPECTS = {"shape": "shape", "dtype": "dtype", "graph": "missing-gradient"}
"""Cause for each aspect in which an output differs; for all other aspects, it is `kernel-mismatch`."""


def compare_outputs(
    run: Run,
    words: str,
    outputs: Sequence[TensorName],
    found: Sequence[Tensor | None],
    fault: Callable[[int, Any], Difference | None],
    wrong: set[str | None],
    **evidence: Any,
) -> Iterator[Failure]:
    """Yield a failure for each output of a different form of the call that differs from the right output.

    Args:
        run: The run.
        words: Text that names the form and the right output, with `{}` for the output's name.
        outputs: Names of the outputs.
        found: The outputs.
        fault: Returns the difference of an output, given by position.
        wrong: Names of outputs known to be wrong, which are left out; newly found names are added.
        evidence: Evidence of every failure.
    """
    faults: list[tuple[TensorName, Difference | None]]
    if len(found) != len(outputs):
        faults = [(outputs[0], Difference((), len(found), len(outputs), aspect="count"))]
    else:
        pairs = enumerate(zip(outputs, found, strict=True))
        faults = [(each, None if each.name in wrong else fault(at, got)) for at, (each, got) in pairs]
    for output, each in faults:
        if each is not None:
            wrong.add(output.name)
            message = f"{words.format(output)}: {each}"
            shown = {**evidence, **each.evidence()}
            cause = CAUSES_OF_ASPECTS.get(each.aspect, "kernel-mismatch")
            yield run.failure(output.name, cause, message, output.where, shown)


Function = Callable[[Any], Sequence[Any]]
"""Function from the flat arguments of one example to its results."""


def reference_of(run: Run) -> Function | None:
    """The reference, if it computes the other forms of the call; None if the operator itself does."""
    itself = run.subject.apply is not None or run.subject.specification.opaque
    return None if itself else run.subject.plain(run.sample)


@dataclass(frozen=True)
class Examples:
    """The right results, or gradients, of some examples, from one plain call for each example.

    Args:
        run: Run of the sample that the examples are made of.
        rows: The flat arguments of each example; for gradients, followed by a grad_output for each result.
        differing: Positions at which the rows differ. If there are none, the results have no dimension for
            examples.
        gradients: True for the gradients by the arguments of the run, with zeros where autograd has none.
        dtype: dtype whose rounding floating outputs may have; the run's by default.
        summed: Positions of outputs that are added up over the examples, and not stacked.
        functions: The function whose results are right, then functions that may compute all examples in its
            place, so that their rounding is accepted, too. By default the operator, and the reference if that
            computes the other forms of the call.
    """

    run: Run
    rows: Sequence[list[Any]]
    differing: Sequence[int] = ()
    gradients: bool = False
    dtype: torch.dtype | None = None
    summed: frozenset[int] = frozenset()
    functions: Sequence[Function] = ()

    @cached_property
    def expected(self) -> list[Tensor | None]:
        """The right outputs of all examples together."""
        return self._stacked(self.columns)

    @cached_property
    def columns(self) -> list[tuple[Tensor | None, ...]]:
        """The outputs of all examples, for each output."""
        return self._one_by_one(self._functions[0], self._batch)

    @cached_property
    def varies(self) -> bool:
        """True if the examples' outputs differ in shape (as for `x[x > 0]`): one tensor cannot hold them."""
        shapes = ({one.shape for one in column if one is not None} for column in self.columns)
        return any(len(found) > 1 for found in shapes)

    @cached_property
    def _batch(self) -> list[Any]:
        return batched(self.rows, dict.fromkeys(self.differing, 0))

    @cached_property
    def _functions(self) -> list[Function]:
        run, given = self.run, [*self.functions]
        if not given:
            surrogate = self.gradients and run.subject.specification.gradients.surrogate
            instead = None if surrogate else reference_of(run)
            given = [each for each in (partial(run.subject.call, run.sample), instead) if each is not None]
        return [partial(self._gradients, each) for each in given] if self.gradients else given

    def _gradients(self, function: Function, values: Sequence[Any]) -> list[Tensor]:
        count = len(self.run.sample.flat)
        return vjp_or_zeros(function, values[:count], self.run.argnums, values[count:])

    def _one_by_one(self, function: Function, batch: Sequence[Any]) -> list[tuple[Tensor | None, ...]]:
        def copied(argnum: int, value: Any, row: int) -> Any:  # the function may write into it
            if argnum in self.differing:
                return value[row].clone()
            # Autograd follows the value, to count the elements on which a result depends.
            return value.clone() if isinstance(value, Tensor) and value.requires_grad else replica(value)

        rows = range(len(self.rows))
        examples = ([copied(argnum, value, row) for argnum, value in enumerate(batch)] for row in rows)
        return list(zip(*map(function, examples), strict=True))

    def _together(self, function: Function, batch: Sequence[Any]) -> list[Tensor | None]:
        return self._stacked(self._one_by_one(function, batch))

    def _stacked(self, columns: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
        if not self.differing:
            return [column[0] for column in columns]
        present = [[each for each in column if each is not None] for column in columns]
        stacked = [torch.stack(column) if column else None for column in present]
        return [
            each.sum(0) if each is not None and position in self.summed else each
            for position, each in enumerate(stacked)
        ]

    def fault(self, position: int, got: Tensor | None) -> Difference | None:
        """The difference of an output of all examples; None if it is right, except for rounding."""
        right = self.expected[position]
        form = form_difference(got, right)
        if form is not None or got is None or right is None or exact_difference(got, right) is None:
            return form
        return self.difference(position, got)

    def difference(self, position: int, got: Tensor) -> Difference | None:
        """The worst element of an output; None if rounding explains all, or the right shape varies."""
        dtype = self.dtype or self.run.dtype or own_dtype(self.run.sample)
        answers = (each.at(self._batch, dtype)[position] for each in self._computations)
        alike = (each for each in answers if each.value is not None and each.value.shape == got.shape)
        verdicts = [judge(got, answer) for answer in alike]
        return verdicts[0].difference if verdicts and all(verdict.wrong for verdict in verdicts) else None

    @cached_property
    def _computations(self) -> list[Computation]:
        """Computation of the right outputs, measured only if some bits differ."""
        subject = self.run.subject
        return [
            Computation.of(
                partial(self._together, function),
                self._batch,
                subject.generator(),
                has_truth=subject.has_truth,
                computed_in=partial(computed_in, subject, self.run.sample),
            )
            for function in self._functions
        ]
