"""`torch.func.vmap`: results and gradients are those of a loop, in whatever dimension the batch lies."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import computed_in, differentiated
from opsmith.checking.exceptions import Overlooking, refuse_own, stated
from opsmith.checking.numerics.compare import all_close, exact_difference, share_of_largest
from opsmith.checking.numerics.constants import allowed_roundings, unit_roundoff
from opsmith.checking.promises import of_batches
from opsmith.checking.properties.torch.batched_gradients import BatchedDifferentiation
from opsmith.checking.properties.torch.mapping import (
    SIZE,
    BatchDims,
    ExampleLoop,
    OneByOne,
    ResultFault,
    declares_rule,
    inside_own_rule,
    map_over,
    own_rule,
    refusal,
    rule_words,
    ways,
)
from opsmith.checking.property import (
    REFUSED,
    Coverage,
    Finding,
    Findings,
    Note,
    Property,
    Skipped,
    covered_samples,
    first_line,
    raised,
)
from opsmith.checking.report import Failure
from opsmith.checking.samples.batches import (
    all_finite,
    batch_of,
    batched,
    empty_batch,
    own_dtype,
    replicas,
    working_dtype,
)
from opsmith.checking.samples.sample import Sample, is_inexact
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.checking.subject import Subject, drawing_operations
from opsmith.core.cached_property import cached_property

NAME = "vmap"

OUTER = 2
"""Number of examples of the outer of two nested `vmap`s."""

Mapped = Generator[Finding, None, list[Tensor | None] | None]


def _limit(subject: Subject, reason: str) -> Failure:
    """The limit for what can be mapped in no sample; a class that is called by `apply` need not offer it."""
    location, message = subject.specification.where_of("vmap"), f"it cannot be mapped: {reason}"
    return Failure(NAME, None, "raises", message, location, {REFUSED: "in every sample"})


def run(subject: Subject) -> Findings:
    """Map every sample in several ways, and compare with calls for each example."""
    if subject.lacks("vmap"):
        yield Skipped(
            "it has no rule for `vmap`: torch calls it for each example; `register_vmap` gives it one"
        )
        return
    unchecked, noted = "no sample has a tensor to batch", "a part of it is refused: "
    check_sample = partial(_sample, flags=MappingFlags())
    for finding in covered_samples(NAME, check_sample, unchecked, subject, noted=noted):
        yield finding
        if isinstance(finding, Skipped) and finding.reason != unchecked and not subject.kind.applied:
            yield _limit(subject, finding.reason)


@dataclass
class MappingFlags:
    """Observations of one run of the property that are not about one input or result.

    Args:
        raises: True if a call under `vmap` raised, which is reported once.
        wrong_for_slices: True if calls without `vmap` are wrong for slices of a batch.
    """

    raises: bool = False
    wrong_for_slices: bool = False


def _sample(subject: Subject, sample: Sample, coverage: Coverage, flags: MappingFlags) -> Findings:
    if not any(isinstance(value, Tensor) for value in sample.flat):
        return
    if any(isinstance(value, torch.Generator) for value in sample.flat):
        yield Note("a sample with a generator was left out: it is undefined how it serves a batch")
        return
    every = subject.rank(sample) < subject.effort.transform_samples
    mapped = MappedSample(subject, sample, coverage, flags)
    chosen = [*ways(sample, every=every)]
    if subject.draws or drawing_operations(subject, sample):
        yield from mapped.drawing(chosen[0])
        return
    for batch_dims in chosen:
        yield from mapped.results(batch_dims)
    if coverage.wrong or flags.raises or flags.wrong_for_slices or not coverage.ran:
        return
    argnums = differentiated(subject, sample).argnums
    for batch_dims in chosen if every else chosen[:1]:
        yield from mapped.gradients(batch_dims, argnums)
    if every:
        yield from mapped.nested(chosen[0])
        yield from mapped.without_examples(chosen[0])


@dataclass(frozen=True)
class MappedSample:
    """A sample that is mapped in several ways.

    Args:
        subject: The subject of the check.
        sample: The sample.
        coverage: Progress of the property.
        flags: Its other observations.
    """

    subject: Subject
    sample: Sample
    coverage: Coverage
    flags: MappingFlags
    loops: dict[tuple[Any, ...], ExampleLoop] = field(default_factory=dict)

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """The dtype in which it is mapped."""
        return working_dtype(self.subject, self.sample)

    def call(self, flat: Sequence[Any]) -> list[Any]:
        """The results of one example."""
        return self.subject.call(self.sample, flat)

    @cached_property
    def reference(self) -> OneByOne | None:
        """The reference, if batches are computed by it; None if the operator itself computes them."""
        if self.subject.apply is not None or self.subject.specification.opaque:
            return None
        return self.subject.plain(self.sample)

    def loop(self, argnums: Sequence[int], size: int) -> ExampleLoop:
        """Examples that differ in some arguments, with their results; cached."""
        key = (*sorted(argnums), size)
        if key not in self.loops:
            rows = batch_of(self.subject, self.sample, sorted(argnums), size, self.dtype)
            self.loops[key] = self._loop(self.call, rows, argnums, instead=self.reference)
        return self.loops[key]

    def _loop(
        self,
        function: OneByOne,
        rows: Sequence[list[Any]],
        argnums: Sequence[int],
        summed: frozenset[int] = frozenset(),
        instead: OneByOne | None = None,
    ) -> ExampleLoop:
        dtype = self.dtype or own_dtype(self.sample)
        subject = self.subject
        return ExampleLoop(
            function,
            rows,
            tuple(argnums),
            subject.generator(),
            subject.has_truth,
            dtype,
            summed,
            instead,
            partial(computed_in, subject, self.sample),
        )

    def results(self, batch_dims: BatchDims) -> Findings:
        """Map the sample in one way, and compare every result with the loop's."""
        loop = self.loop(tuple(batch_dims.dims), batch_dims.size)
        batch = batched(loop.rows, batch_dims.dims)
        found = yield from self._tried(
            batch_dims, lambda: map_over(self.call, replicas(batch), batch_dims.dims, batch_dims.out_dim)
        )
        for position, got in enumerate(found or ()):
            name = self.subject.results(self.sample)[position].name
            fault = loop.fault(position, got)
            if fault is None or name in self.coverage.wrong:
                continue
            if self._wrong_for_slices(loop, batch_dims, position):
                self.flags.wrong_for_slices = True
                yield Note(
                    f"{batch_dims} was left out: a call for one example alone is wrong as well, where its "
                    "arguments are slices of larger tensors"
                )
                continue
            self.coverage.wrong.add(name)
            yield self._failure(batch_dims, name, f"`{name}`", fault)

    def _wrong_for_slices(self, loop: ExampleLoop, batch_dims: BatchDims, position: int) -> bool:
        """True if it is wrong without `vmap` too, for slices of the batch, which are not contiguous."""
        batch = batched(loop.rows, batch_dims.dims)
        with Overlooking():  # it may raise for slices as well
            each = [
                self.call(
                    [
                        value.select(batch_dims.dims[argnum], row) if argnum in batch_dims.dims else value
                        for argnum, value in enumerate(batch)
                    ]
                )[position]
                for row in range(batch_dims.size)
            ]
            shapes = {None if one is None else one.shape for one in each}
            return len(shapes) > 1 or None in shapes or loop.fault(position, torch.stack(each)) is not None
        return True

    def gradients(self, batch_dims: BatchDims, argnums: Sequence[int]) -> Findings:
        """Compare the gradients of every example, and of the whole batch, with the loop's."""
        loop = self.loop(tuple(batch_dims.dims), batch_dims.size)
        rows = loop.rows
        if loop.varies:
            yield Note(f"gradients of {self.sample.brief} were left out: its results vary in size")
            return
        if not all_finite(loop.expected):
            yield Note(f"gradients of {self.sample.brief} were left out: its results are not all finite")
            return
        given = BatchedDifferentiation(self.subject, self.sample, argnums, rows, batch_dims.dims)
        if not argnums or given.every_dim == batch_dims.dims:
            return
        surrogate = self.subject.specification.gradients.surrogate
        one = given.one(self.call)
        instead = None if surrogate or self.reference is None else given.one(self.reference)
        kinds = (
            ("`vmap` of the gradient of", given.by_examples, frozenset[int]()),
            ("a backward through `vmap`, the gradient of", given.through, given.summed),
        )
        for words, call, summed in kinds:
            key = ("gradients", *sorted(given.every_dim), *sorted(summed), batch_dims.size)
            if key not in self.loops:
                differing = tuple(given.every_dim)
                self.loops[key] = self._loop(one, given.with_grads, differing, summed, instead)
            loop = self.loops[key]
            found = yield from self._tried(batch_dims, call)
            for position, got in enumerate(found or ()):
                label = self.sample.labels[argnums[position]]
                fault = loop.fault(position, got)
                if fault is not None and label not in self.coverage.wrong:
                    self.coverage.wrong.add(label)
                    yield self._failure(batch_dims, label, f"{words} `{label}`", fault)

    def nested(self, batch_dims: BatchDims) -> Findings:
        """Nest two `vmap`s, with the batches in different dimensions."""
        loop = self.loop(tuple(batch_dims.dims), OUTER * SIZE)
        last = dict.fromkeys(batch_dims.dims, -1)
        inner = [batched(loop.rows[at * SIZE : (at + 1) * SIZE], last) for at in range(OUTER)]
        batch = batched(inner, batch_dims.dims)
        found = yield from self._tried(
            batch_dims, lambda: map_over(lambda flat: map_over(self.call, flat, last), batch, batch_dims.dims)
        )
        for position, got in enumerate(found or ()):
            name = self.subject.results(self.sample)[position].name
            fault = loop.fault(position, None if got is None else got.flatten(0, 1))
            if fault is not None:
                yield self._failure(batch_dims, name, f"under one `vmap` inside of another, `{name}`", fault)

    def without_examples(self, batch_dims: BatchDims) -> Findings:
        """Map a batch of no examples, if this is accepted."""
        none = BatchDims(batch_dims.dims, batch_dims.labels, size=0)
        flat = self.sample.at(self.dtype)
        expected = self.call(replicas(flat))
        try:
            with without_warnings():
                found = map_over(self.call, empty_batch(flat, none.dims), none.dims)
        except Exception as error:
            refuse_own(error)
            yield Note(f"a batch of no examples is refused: {type(error).__name__}: {first_line(error)}")
            return
        for result, got, one in zip(self.subject.results(self.sample), found, expected, strict=True):
            if got is None or one is None or list(got.shape) == [0, *one.shape]:
                continue
            fault = ResultFault("shape", str(list(got.shape)), str([0, *one.shape]))
            if own_rule(self.subject) and not self._torch_loses_form(none, flat):
                yield self._failure(none, result.name, f"`{result.name}`", fault)
            else:
                yield Note(f"for a batch of no examples, torch's rules do not keep the form: {fault}")

    def _torch_loses_form(self, batch_dims: BatchDims, flat: Sequence[Any]) -> bool:
        """True if `vmap` of the reference, as a plain function, gives another shape as well."""
        if self.reference is None:
            return False
        found: list[Tensor | None] | None = None
        with Overlooking(), without_warnings():
            found = map_over(self.reference, empty_batch(flat, batch_dims.dims), batch_dims.dims)
        if found is None:
            return False  # it is refused, so that no shape is lost
        pairs = zip(found, self.reference([*flat]), strict=True)
        return any(g is not None and o is not None and list(g.shape) != [0, *o.shape] for g, o in pairs)

    def drawing(self, batch_dims: BatchDims) -> Findings:
        """Compare shapes of an operator that draws, and equal examples under `randomness="same"`."""
        flat = self.sample.at()
        expected = self.call(replicas(flat))
        batch = batched([flat] * SIZE, batch_dims.dims)
        for randomness in ("same", "different"):
            call = partial(map_over, self.call, batch, batch_dims.dims, 0, randomness)
            found = yield from self._tried(batch_dims, call)
            described = self.subject.results(self.sample)
            for result, got, one in zip(described, found or (), expected, strict=False):
                if got is None or one is None:
                    continue
                if got.shape != (SIZE, *one.shape):
                    fault = ResultFault("shape", str(list(got.shape)), str([SIZE, *one.shape]))
                    yield self._failure(batch_dims, result.name, f"`{result.name}`", fault)
                elif randomness == "same" and any(_differs(got[0], each) for each in got):
                    fault = ResultFault("result", "another one for equal examples", "the same one")
                    yield self._failure(
                        batch_dims, result.name, f"with randomness='same', `{result.name}`", fault
                    )

    def _tried(self, batch_dims: BatchDims, call: Callable[[], list[Tensor | None]]) -> Mapped:
        """Results of a call under `vmap`; None where it is refused, or raises, which is reported."""
        try:
            with without_warnings():
                found = call()
        except Exception as error:
            refuse_own(error)
            empty = any(isinstance(value, Tensor) and not value.numel() for value in self.sample.flat)
            reason = refusal(self.subject, error, empty=empty)
            if reason is None and self._reference_refused(batch_dims):
                reason = f"of the reference, which raises {type(error).__name__}: {first_line(error)}"
            if reason is not None:
                self.coverage.refused[reason] = None
            elif not self.flags.raises:
                self.flags.raises = True
                failure = raised(NAME, self.subject, error, str(self.sample))
                yield Failure(
                    NAME,
                    failure.input,
                    failure.cause,
                    f"{self._raising(error)}: {failure.message}",
                    self.subject.specification.where_of("vmap"),
                    {**failure.evidence, "mapped over": str(batch_dims)},
                )
            return None
        self.coverage.ran += 1
        return found

    def _raising(self, error: Exception) -> str:
        """Words before an exception of a call under `vmap`."""
        if declares_rule(self.subject) and not inside_own_rule(self.subject, error) and not stated(error):
            by = "its own `vmap`" if own_rule(self.subject) else "`generate_vmap_rule = True`"
            return f"by {by} it says that it can be mapped, and torch cannot map it"
        return f"{rule_words(self.subject)} raises where calls for each example do not"

    def _reference_refused(self, batch_dims: BatchDims) -> bool:
        """True if `vmap` of the reference, as a plain function, raises as well."""
        if self.reference is None or own_rule(self.subject):
            return False
        rows = self.loop(tuple(batch_dims.dims), batch_dims.size).rows
        with Overlooking(), without_warnings():
            map_over(self.reference, batched(rows, batch_dims.dims), batch_dims.dims)
            return False
        return True

    def _failure(self, batch_dims: BatchDims, name: str, what: str, fault: ResultFault) -> Failure:
        dtype = str(self.dtype or own_dtype(self.sample)).removeprefix("torch.")
        return Failure(
            NAME,
            name,
            fault.cause,
            f"{rule_words(self.subject)} is wrong: {what} is not what a loop over the examples gives: "
            f"{fault}",
            self.subject.specification.where_of("vmap"),
            {"sample": f"{self.sample} in {dtype}", "mapped over": str(batch_dims), **fault.evidence()},
        )


def _differs(first: Tensor, other: Tensor) -> bool:
    """True if results of equal examples are more than a rounding apart, as where they draw other numbers.

    torch may round the last elements of a batch in another manner, since they fill no vector.
    """
    if not is_inexact(first):
        return exact_difference(first, other) is not None
    share = allowed_roundings(first.numel()) * unit_roundoff(first.dtype)
    return not all_close(other, first, share_of_largest(share, first))


VMAP = Property(
    NAME,
    "a batch under torch.func.vmap gives what a loop gives, wherever it lies",
    run,
    subset=True,
    transforms=True,
    given=of_batches,
    reruns=True,
)
