"""Ways to batch the arguments of a sample, and a call under `torch.func.vmap`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import stated
from opsmith.checking.numerics.answer import Computation
from opsmith.checking.numerics.compare import Difference, exact_difference, metadata_difference
from opsmith.checking.numerics.judge import judge
from opsmith.checking.property import first_line
from opsmith.checking.samples.batches import batched
from opsmith.checking.samples.sample import Sample, replica
from opsmith.checking.subject import Subject
from opsmith.core.cached_property import cached_property
from opsmith.core.call_arguments import tensors_in
from opsmith.torch_library.torch_messages import NO_BATCHING_RULE, has_message

SIZE = 3


@dataclass(frozen=True)
class BatchDims:
    """One way to batch the arguments of a sample.

    Args:
        dims: Batch dimension of each batched argument, by its position.
        out_dim: Batch dimension of the results.
        size: Number of examples.
        labels: Name in messages of each tensor argument, by its position.
    """

    dims: Mapping[int, int]
    labels: Mapping[int, str]
    out_dim: int = 0
    size: int = SIZE

    def __str__(self) -> str:
        given = ", ".join(f"{label}: {self.dims.get(argnum)}" for argnum, label in self.labels.items())
        out = f", out_dims={self.out_dim}" if self.out_dim else ""
        count = f"a batch of {self.size}" if self.size else "an empty batch"
        return f"in_dims=({given}){out}, {count}"


def ways(sample: Sample, *, every: bool) -> Iterator[BatchDims]:
    """Choices of batched arguments and dimensions: all arguments, each alone; first, last, mixed dimensions.

    Args:
        sample: The sample.
        every: True to yield all of them; else those that differ most.
    """
    labels = {
        argnum: sample.labels[argnum] for argnum, value in enumerate(sample.flat) if isinstance(value, Tensor)
    }
    argnums = tuple(labels)
    second = {argnum: min(1, sample.flat[argnum].dim()) for argnum in argnums}
    yield BatchDims(dict.fromkeys(argnums, 0), labels)
    yield BatchDims(dict.fromkeys(argnums, -1), labels, out_dim=-1)
    if len(argnums) > 1:
        yield from (BatchDims({argnum: 0}, labels) for argnum in (argnums if every else argnums[-1:]))
    if not every:
        return
    yield BatchDims(second, labels)
    if len(argnums) > 1:
        mixed = {argnum: -1 if at % 2 else 0 for at, argnum in enumerate(argnums)}
        yield BatchDims(mixed, labels)
    yield BatchDims(dict.fromkeys(argnums, 0), labels, size=1)


def map_over(
    function: Any, batch: Sequence[Any], dims: Mapping[int, int], out_dim: int = 0, randomness: str = "error"
) -> list[Tensor | None]:
    """The results of a function under `vmap`, the batch in the first dimension; None for a result of None.

    Args:
        function: Takes flat arguments, returns results.
        batch: Flat arguments.
        dims: For each argument that has a batch, its dimension.
        out_dim: Dimension in which `vmap` puts the batch.
        randomness: As of `vmap`.
    """
    tensors = [argnum for argnum, value in enumerate(batch) if isinstance(value, Tensor)]
    present: list[bool] = []

    def call(*given: Tensor) -> tuple[Tensor, ...]:
        flat = list(batch)
        for argnum, value in zip(tensors, given, strict=True):
            flat[argnum] = value
        results = list(function(flat))
        present[:] = [result is not None for result in results]
        return tuple(tensors_in(results))

    over = torch.func.vmap(call, tuple(dims.get(argnum) for argnum in tensors), out_dim, randomness)
    found = iter(over(*(batch[argnum] for argnum in tensors)))
    return [next(found).movedim(out_dim, 0) if is_there else None for is_there in present]


def rule_words(subject: Subject) -> str:
    """Name of what computes a batch, in words."""
    specification = subject.specification
    if subject.kind.applied or specification.origin.registered:
        if specification.origin.own("vmap"):
            return "its own rule for `vmap`"
        return "the rule for `vmap` that torch derives from its forward" if subject.kind.applied else "`vmap`"
    if specification.batching is not None:
        return f"the rule for `vmap` that batching={specification.batching!r} makes"
    return "the rule for `vmap` that follows from the reference"


def declares_rule(subject: Subject) -> bool:
    """True if a class that is called through `apply` says that it can be mapped.

    It has a rule of its own, or `generate_vmap_rule = True`.
    """
    origin = subject.specification.origin
    derived = subject.kind.applied and bool(getattr(origin.subject, "generate_vmap_rule", False))
    return derived or (subject.kind.applied and origin.own("vmap") is not None)


def own_rule(subject: Subject) -> bool:
    """True if its author wrote a rule for batches, or declares that one call serves a batch."""
    specification = subject.specification
    return specification.batching is not None or specification.origin.own("vmap") is not None


def refusal(subject: Subject, error: Exception, *, empty: bool) -> str | None:
    """The reason for a refusal of `vmap`, by torch or the author; None for a fault.

    Args:
        subject: The subject of the check.
        error: The exception.
        empty: True if a tensor has no elements, which not all of torch's own rules support.
    """
    if isinstance(error, NotImplementedError) and (stated(error) or not declares_rule(subject)):
        return first_line(error)
    # The messages below are torch's only if torch raises them.
    if inside_own_rule(subject, error) or stated(error):
        return None
    if declares_rule(subject) and not empty:
        return None  # it promises what torch refuses
    if has_message(error, NO_BATCHING_RULE) or (empty and not own_rule(subject)):
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def inside_own_rule(subject: Subject, error: Exception) -> bool:
    """True if an exception passed through the author's own rule for `vmap`."""
    own = subject.specification.origin.own("vmap")
    code = getattr(own and own.function, "__code__", None)
    trace = error.__traceback__
    while trace is not None:
        if code is not None and trace.tb_frame.f_code is code:
            return True
        trace = trace.tb_next
    return False


OneByOne = Callable[[list[Any]], Sequence[Tensor | None]]
"""Function from the flat arguments of one example to its results."""


@dataclass(frozen=True)
class ExampleLoop:
    """Results of the examples of a batch, one after the other.

    Args:
        function: Takes one example.
        rows: The flat arguments of each example.
        argnums: The arguments in which they differ.
        generator: Source of the perturbations that measure rounding.
        has_truth: True if a run in float64 is a better answer than one in the dtype itself.
        dtype: dtype of floating arguments.
        summed: Positions of results that are added up over the examples, and not stacked.
        instead: Function that may compute a batch instead, and round as it does: the reference,
            where the function runs a kernel.
        computed_in: Gives the dtype that the function computes in; else it is measured, of all its results.
    """

    function: OneByOne
    rows: Sequence[list[Any]]
    argnums: Sequence[int]
    generator: torch.Generator
    has_truth: bool
    dtype: torch.dtype
    summed: frozenset[int] = frozenset()
    instead: OneByOne | None = None
    computed_in: Callable[[], torch.dtype] | None = None

    @cached_property
    def expected(self) -> list[Tensor | None]:
        """The right results of the whole batch."""
        return self._stacked(self._columns)

    @cached_property
    def _batch(self) -> list[Any]:
        return batched(self.rows, dict.fromkeys(self.argnums, 0))

    @cached_property
    def varies(self) -> bool:
        """True if results of the examples have several shapes, as of `x[x > 0]`: no tensor holds them all."""
        shapes = ({one.shape for one in column if one is not None} for column in self._columns)
        return any(len(found) > 1 for found in shapes)

    @cached_property
    def _columns(self) -> list[tuple[Tensor | None, ...]]:
        return self._one_by_one(self.function, self._batch)

    def _together(self, function: OneByOne, batch: Sequence[Any]) -> list[Tensor | None]:
        return self._stacked(self._one_by_one(function, batch))

    def _one_by_one(self, function: OneByOne, batch: Sequence[Any]) -> list[tuple[Tensor | None, ...]]:
        """The results of every example, column by column."""
        each = [
            function(
                [
                    value[row].clone() if argnum in self.argnums else replica(value)  # it may write into both
                    for argnum, value in enumerate(batch)
                ]
            )
            for row in range(len(self.rows))
        ]
        return list(zip(*each, strict=True))

    def _stacked(self, columns: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
        return [self._joined(position, column) for position, column in enumerate(columns)]

    def _joined(self, position: int, column: Sequence[Tensor | None]) -> Tensor | None:
        present = [each for each in column if each is not None]
        if not present:
            return None
        stacked = torch.stack(present)
        return stacked.sum(0) if position in self.summed else stacked

    def fault(self, position: int, got: Tensor | None) -> ResultFault | None:
        """The fault of a result; None where it is right, to rounding."""
        right = self.expected[position]
        if got is None and right is None:
            return None
        if got is None or right is None:
            actual, wanted = ("None" if each is None else "a tensor" for each in (got, right))
            return ResultFault("missing", actual, wanted)
        form = metadata_difference(got, right, strides=False)
        if form is not None:
            return ResultFault(*form)
        if exact_difference(got, right) is None:
            return None
        answers = (each.at(self._batch, self.dtype)[position] for each in self._computations)
        verdicts = [judge(got, answer) for answer in answers]
        if all(verdict.wrong for verdict in verdicts):
            return ResultFault("value", difference=verdicts[0].difference)
        return None

    @cached_property
    def _computations(self) -> list[Computation]:
        """What gives the right results, measured only if some bits differ."""
        return [
            Computation.of(
                partial(self._together, function),
                self._batch,
                self.generator,
                has_truth=self.has_truth,
                computed_in=self.computed_in,
            )
            for function in (self.function, self.instead)
            if function is not None
        ]


@dataclass(frozen=True)
class ResultFault:
    """Fault of one result of a batch.

    Args:
        aspect: `shape`, `dtype`, `device`, `missing` or `value`; of compiled code also `count`, of results,
            and `graph`, whether autograd follows one; where numbers are drawn, `result`.
        got: The aspect of the result.
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
        return self.aspect if self.aspect in ("shape", "dtype") else "kernel-mismatch"

    def __str__(self) -> str:
        if self.difference is not None:
            return f"{self.difference}"
        if self.aspect == "missing":
            return f"it is {self.got}, where {self.expected} is right"
        return f"it has the {self.aspect} {self.got}, where {self.expected} is right"

    def evidence(self) -> dict[str, Any]:
        """Evidence for a report."""
        if self.difference is not None:
            return self.difference.evidence()
        return {"got": self.got, "expected": self.expected}
