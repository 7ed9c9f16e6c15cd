"""A call in another form (mapped, compiled, under autocast): its outputs are held to those of plain calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import computed_in, rule_location
from opsmith.checking.numerics.autodiff import vjp_or_zeros
from opsmith.checking.report import Failure
from opsmith.checking.run import TensorName
from opsmith.checking.samples.batches import batched, own_dtype
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.core.cached_property import cached_property
from opsmith.judging.answer import Computation
from opsmith.judging.compare import Difference, exact_difference, metadata_difference
from opsmith.judging.judge import judge
from opsmith.judging.tensors import replica


@dataclass(frozen=True)
class Fault:
    """Fault of one output.

    Args:
        aspect: `shape`, `dtype`, `device`, `layout` or `stride`; `form` where one of both is None; `value`;
            of all outputs their `count`; `graph`, where autograd follows one of both alone; `result`, where
            numbers are drawn.
        got: The aspect of the output.
        expected: The right aspect.
        difference: Difference of the values.
    """

    aspect: str
    got: str = ""
    expected: str = ""
    difference: Difference | None = None

    @property
    def cause(self) -> str:
        """Cause of the fault."""
        known = {"shape": "shape", "dtype": "dtype", "graph": "missing-gradient"}
        return known.get(self.aspect, "kernel-mismatch")

    def __str__(self) -> str:
        if self.difference is not None:
            return f"{self.difference}"
        prefix = {"form": "it is", "graph": "it has"}.get(self.aspect, f"it has the {self.aspect}")
        return f"{prefix} {self.got}, where {self.expected} is right"

    def evidence(self) -> dict[str, Any]:
        """Evidence for a report."""
        if self.difference is not None:
            return self.difference.evidence()
        return {"got": self.got, "expected": self.expected}


def form_fault(got: Tensor | None, right: Tensor | None, *, strides: bool = False) -> Fault | None:
    """The fault of an output apart from its values: it is None or not, its shape, its dtype, its device."""
    if got is None or right is None:
        actual, wanted = ("None" if each is None else "a tensor" for each in (got, right))
        return None if got is right else Fault("form", actual, wanted)
    found = metadata_difference(got, right, strides=strides)
    return None if found is None else Fault(*found)


@dataclass(frozen=True)
class Form:
    """Another form of calls of an operator.

    Args:
        property: Name of the property.
        words: The form, before the name of an output in a message.
        than: What the output is held to, after its name.
        outputs: Names of the outputs.
        fault: Gives the fault of an output, by its position.
        evidence: Evidence of every failure.
    """

    property: str
    words: str
    than: str
    outputs: Sequence[TensorName]
    fault: Callable[[int, Any], Fault | None]
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def failures(self, found: Sequence[Tensor | None], wrong: set[str | None]) -> Iterator[Failure]:
        """Yield the failure of each output that has a fault.

        Args:
            found: The outputs.
            wrong: Names of outputs that are known to be wrong, which are left out; it gets the new ones.
        """
        if len(found) != len(self.outputs):
            yield self._failure(self.outputs[0], Fault("count", str(len(found)), str(len(self.outputs))))
            return
        for position, (output, got) in enumerate(zip(self.outputs, found, strict=True)):
            fault = None if output.name in wrong else self.fault(position, got)
            if fault is not None:
                wrong.add(output.name)
                yield self._failure(output, fault)

    def _failure(self, output: TensorName, fault: Fault) -> Failure:
        message = f"{self.words}{output} {self.than}: {fault}"
        evidence = {**self.evidence, **fault.evidence()}
        return Failure(self.property, output.name, fault.cause, message, output.where, evidence)


def results_of(subject: Subject, sample: Sample, where: str) -> list[TensorName]:
    """The names of the visible results."""
    return [TensorName(each.name, "result", where) for each in subject.results(sample)]


def gradients_by(
    subject: Subject, sample: Sample, argnums: Sequence[int], where: str = ""
) -> list[TensorName]:
    """The names of the gradients by some arguments; each has the place of its rule by default."""
    places = (where or rule_location(subject, sample.names[argnum]) for argnum in argnums)
    labels = (sample.labels[argnum] for argnum in argnums)
    return [TensorName(label, "gradient", place) for label, place in zip(labels, places, strict=True)]


Function = Callable[[Any], Sequence[Any]]
"""Function from the flat arguments of one example to its results."""


def reference_of(subject: Subject, sample: Sample) -> Function | None:
    """The reference, if it computes other forms of the call; None if the operator itself does."""
    itself = subject.apply is not None or subject.specification.opaque
    return None if itself else subject.plain(sample)


def gradients_of(
    function: Function, argnums: Sequence[int], count: int, values: Sequence[Any]
) -> list[Tensor]:
    """The gradients by some arguments, zeros where autograd has none.

    Args:
        function: Takes flat arguments.
        argnums: The arguments to differentiate by.
        count: Number of flat arguments.
        values: Flat arguments, and behind them a grad_output for each result.
    """
    return vjp_or_zeros(function, values[:count], argnums, values[count:])


@dataclass(frozen=True)
class Examples:
    """The right results, or gradients, of some examples: those of plain calls, one after the other.

    Args:
        sample: The sample that the examples are made of.
        rows: The flat arguments of each example; behind them, for gradients, a grad_output for each result.
        differing: Positions at which the rows differ; the results of a row that differs in none have no
            dimension for examples.
        argnums: The arguments to differentiate by; None for results.
        dtype: dtype of floating arguments; the sample's own by default.
        summed: Positions of results that are added up over the examples, and not stacked.
        functions: The function whose results are right, and others that may compute all examples instead, and
            round as they do. By default the operator, and the reference where that computes other forms.
    """

    subject: Subject
    sample: Sample
    rows: Sequence[list[Any]]
    differing: Sequence[int] = ()
    argnums: Sequence[int] | None = None
    dtype: torch.dtype | None = None
    summed: frozenset[int] = frozenset()
    functions: Sequence[Function] = ()

    @cached_property
    def expected(self) -> list[Tensor | None]:
        """The right results of all examples together."""
        return self._stacked(self.columns)

    @cached_property
    def columns(self) -> list[tuple[Tensor | None, ...]]:
        """For each result, those of all examples."""
        return self._one_by_one(self._functions[0], self._batch)

    @cached_property
    def varies(self) -> bool:
        """True if results of the examples have several shapes, as of `x[x > 0]`: no tensor holds them all."""
        shapes = ({one.shape for one in column if one is not None} for column in self.columns)
        return any(len(found) > 1 for found in shapes)

    @cached_property
    def _batch(self) -> list[Any]:
        return batched(self.rows, dict.fromkeys(self.differing, 0))

    @cached_property
    def _functions(self) -> list[Function]:
        own, given = partial(self.subject.call, self.sample), self.functions
        if not given:
            surrogate = self.argnums is not None and self.subject.specification.gradients.surrogate
            instead = None if surrogate else reference_of(self.subject, self.sample)
            given = [own] if instead is None else [own, instead]
        if self.argnums is None:
            return [*given]
        count = len(self.sample.flat)
        return [partial(gradients_of, each, self.argnums, count) for each in given]

    def _one_by_one(self, function: Function, batch: Sequence[Any]) -> list[tuple[Tensor | None, ...]]:
        def copied(argnum: int, value: Any, row: int) -> Any:  # it may write into it
            if argnum in self.differing:
                return value[row].clone()
            followed = (
                isinstance(value, Tensor) and value.requires_grad
            )  # to count what an element depends on
            return value.clone() if followed else replica(value)

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

    def fault(self, position: int, got: Tensor | None) -> Fault | None:
        """The fault of a result of all examples; None where it is right, to rounding."""
        right = self.expected[position]
        fault = form_fault(got, right)
        if fault is not None or got is None or right is None or exact_difference(got, right) is None:
            return fault
        difference = self.difference(position, got)
        return None if difference is None else Fault("value", difference=difference)

    def difference(self, position: int, got: Tensor) -> Difference | None:
        """The worst element of a result; None where rounding explains all, or changes the right shape."""
        answers = (each.at(self._batch, self._dtype)[position] for each in self._computations)
        alike = (each for each in answers if each.value is not None and each.value.shape == got.shape)
        verdicts = [judge(got, answer) for answer in alike]
        return verdicts[0].difference if verdicts and all(verdict.wrong for verdict in verdicts) else None

    @property
    def _dtype(self) -> torch.dtype:
        return self.dtype or own_dtype(self.sample)

    @cached_property
    def _computations(self) -> list[Computation]:
        """What gives the right results, measured only if some bits differ."""
        subject = self.subject
        return [
            Computation.of(
                partial(self._together, function),
                self._batch,
                subject.generator(),
                has_truth=subject.has_truth,
                computed_in=partial(computed_in, subject, self.sample),
            )
            for function in self._functions
        ]
