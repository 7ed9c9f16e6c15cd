"""Ways to ask for the same outputs, and one driver that compares what each gives with what is right.

An output is a result or a gradient. It may be asked for in another layout of memory, by another method of
autograd, with other parameters frozen, or in another form: mapped, compiled, under autocast. It must stay the
same.
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
    run, named = replace(run, name=property), fault.named
    if fault.error is None:
        return run.failure(named.name, cause, f"{named} {differs} {when}: {fault}{hint}", named.where)
    where = run.backward_location() if run.argnums else run.subject.specification.where
    message = f"{when}{raises} {fault}; else it does not{hint}"
    return run.failure(None, error, message, innermost(fault.error, where))


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
class Twin:
    """A run whose outputs another one must have, with a bound of their rounding; or the exception of the run.

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
        found = attempt(lambda: self.function(replicas(self.values)))
        if isinstance(found, Raised):
            self.error = found.error
        else:
            self.outputs = found

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
        return difference if difference is not None and self._is_steady(position, expected) else None

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
        own, truth = self.subject.generator(), self.subject.has_truth
        made = attempt(lambda: Computation.of(self.function, self.values, own, has_truth=truth))
        return None if isinstance(made, Raised) else made  # as of a class that takes one dtype alone

    def _is_steady(self, position: int, expected: Tensor) -> bool:
        """True if an output stays in repeated runs, and under perturbed inputs.

        Otherwise what was changed is not the reason; at a tie, each of several outputs is right.
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
        """The output of one more run, at perturbed values; None if it raises, or has another shape."""
        generator, expected = self.subject.generator(PERTURBATIONS), self.outputs[position]
        with Overlooking():
            values = [perturbed(each, step, generator) for each in replicas(self.values)]
            other = self.function(values)[position]
            alike = other is not None and expected is not None and other.shape == expected.shape
            return other if alike else None
        return None


CAUSES_OF_ASPECTS = {"shape": "shape", "dtype": "dtype", "graph": "missing-gradient"}
"""Cause for each aspect of an output that differs; of any other, and of values, it is `kernel-mismatch`."""


def compare_outputs(
    run: Run,
    words: str,
    outputs: Sequence[TensorName],
    found: Sequence[Tensor | None],
    fault: Callable[[int, Any], Difference | None],
    wrong: set[str | None],
    **evidence: Any,
) -> Iterator[Failure]:
    """Yield the failure of each output of another form that differs from the right one.

    Args:
        run: The run.
        words: The form, and what an output of it is held to, around `{}` for its name.
        outputs: Names of the outputs.
        found: The outputs.
        fault: Gives the difference of an output, by its position.
        wrong: Names of outputs that are known to be wrong, which are left out; it gets the new ones.
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
    """The reference, if it computes other forms of the call; None if the operator itself does."""
    itself = run.subject.apply is not None or run.subject.specification.opaque
    return None if itself else run.subject.plain(run.sample)


@dataclass(frozen=True)
class Examples:
    """The right results, or gradients, of some examples: those of plain calls, one after the other.

    Args:
        run: Run of the sample that the examples are made of.
        rows: The flat arguments of each example; behind them, for gradients, a grad_output for each result.
        differing: Positions at which the rows differ; the results of a row that differs in none have no
            dimension for examples.
        gradients: True for the gradients by the arguments of the run, zeros where autograd has none.
        dtype: dtype that floating outputs are held to; that of the run by default.
        summed: Positions of outputs that are added up over the examples, and not stacked.
        functions: The function whose results are right, and others that may compute all examples instead, and
            round as they do. By default the operator, and the reference where that computes other forms.
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
        """For each output, those of all examples."""
        return self._one_by_one(self._functions[0], self._batch)

    @cached_property
    def varies(self) -> bool:
        """True if outputs of the examples have several shapes, as of `x[x > 0]`: no tensor holds them all."""
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
        def copied(argnum: int, value: Any, row: int) -> Any:  # it may write into it
            if argnum in self.differing:
                return value[row].clone()
            # To count what an element depends on, autograd follows it.
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
        """The difference of an output of all examples; None where it is right, to rounding."""
        right = self.expected[position]
        form = form_difference(got, right)
        if form is not None or got is None or right is None or exact_difference(got, right) is None:
            return form
        return self.difference(position, got)

    def difference(self, position: int, got: Tensor) -> Difference | None:
        """The worst element of an output; None where rounding explains all, or changes the right shape."""
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
