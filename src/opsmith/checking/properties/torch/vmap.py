"""`torch.func.vmap`: results and gradients are those of a loop, in whatever dimension the batch lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import TensorName, differentiated
from opsmith.checking.exceptions import Overlooking, stated
from opsmith.checking.numerics.answer import allowed_roundings, unit_roundoff
from opsmith.checking.numerics.compare import all_close, exact_difference, share_of_largest
from opsmith.checking.promises import of_batches
from opsmith.checking.properties.torch.forms import (
    Examples,
    Fault,
    Form,
    Function,
    Raised,
    attempt,
    form_fault,
    gradients_by,
    gradients_of,
    reference_of,
    results_of,
)
from opsmith.checking.properties.torch.mapping import (
    SIZE,
    BatchDims,
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
    Findings,
    Note,
    Property,
    Skipped,
    covered_samples,
    raised,
)
from opsmith.checking.report import Failure
from opsmith.checking.samples.batches import all_finite, batch_of, batched, own_dtype, working_dtype
from opsmith.checking.samples.grad_outputs import random_grad_outputs, results_with_gradient
from opsmith.checking.samples.sample import Sample, is_inexact
from opsmith.checking.subject import Subject, drawing_operations
from opsmith.core.cached_property import cached_property
from opsmith.core.call_arguments import tensors_in

NAME = "vmap"

OUTER = 2
"""Number of examples of the outer of two nested `vmap`s."""


def run(subject: Subject) -> Findings:
    """Map every sample in several ways, and compare with calls for each example."""
    if subject.lacks("vmap"):
        yield Skipped(
            "it has no rule for `vmap`: torch calls it for each example; `register_vmap` gives it one"
        )
        return
    unchecked, noted = "no sample has a tensor to batch", "a part of it is refused: "
    check_sample = partial(_sample, slices=[])
    for finding in covered_samples(NAME, check_sample, unchecked, subject, noted=noted):
        yield finding
        # A class that is called by `apply` need not offer it.
        if isinstance(finding, Skipped) and finding.reason != unchecked and not subject.kind.applied:
            message = f"it cannot be mapped: {finding.reason}"
            location = subject.specification.where_of("vmap")
            yield Failure(NAME, None, "raises", message, location, {REFUSED: "in every sample"})


def _sample(subject: Subject, sample: Sample, coverage: Coverage, slices: list[Note]) -> Findings:
    if not any(isinstance(value, Tensor) for value in sample.flat):
        return
    if any(isinstance(value, torch.Generator) for value in sample.flat):
        yield Note("a sample with a generator was left out: it is undefined how it serves a batch")
        return
    every = subject.rank(sample) < subject.effort.transform_samples
    mapped = MappedSample(subject, sample, coverage, slices)
    chosen = [*ways(sample, every=every)]
    if subject.draws or drawing_operations(subject, sample):
        yield from mapped.drawing(chosen[0])
        return
    for batch_dims in chosen:
        yield from mapped.results(batch_dims)
    yield from slices
    if coverage.wrong or slices or not coverage.ran:
        return
    for batch_dims in chosen if every else chosen[:1]:
        yield from mapped.gradients(batch_dims)
    if every:
        yield from mapped.nested(chosen[0])
        yield from mapped.without_examples(chosen[0])


@dataclass(frozen=True)
class MappedSample:
    """A sample that is mapped in several ways.

    Args:
        subject: The subject of the check.
        sample: The sample.
        coverage: Progress of the property; None is in `wrong` if a call under `vmap` raised.
        slices: Notes on batches for whose slices calls without `vmap` are wrong as well.
    """

    subject: Subject
    sample: Sample
    coverage: Coverage
    slices: list[Note]
    loops: dict[tuple[Any, ...], Examples] = field(default_factory=dict)

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """The dtype in which it is mapped."""
        return working_dtype(self.subject, self.sample)

    @cached_property
    def reference(self) -> Function | None:
        """The reference, if batches are computed by it; None if the operator itself computes them."""
        return reference_of(self.subject, self.sample)

    def call(self, flat: Sequence[Any]) -> list[Any]:
        """The results of one example."""
        return self.subject.call(self.sample, flat)

    def loop(self, batch_dims: BatchDims, size: int = 0) -> Examples:
        """Examples that differ in some arguments, with their results; cached."""
        key = (*sorted(batch_dims.dims), size or batch_dims.size)
        if key not in self.loops:
            rows = batch_of(self.subject, self.sample, key[:-1], key[-1], self.dtype)
            self.loops[key] = Examples(self.subject, self.sample, rows, key[:-1], dtype=self.dtype)
        return self.loops[key]

    def results(self, batch_dims: BatchDims) -> Findings:
        """Map the sample in one way, and compare every result with the loop's."""
        loop, dims = self.loop(batch_dims), batch_dims.dims

        def fault(position: int, got: Tensor | None) -> Fault | None:
            found = loop.fault(position, got)
            if found is None or not self._wrong_for_slices(batch_dims, position):
                return found
            words = "a call for one example alone is wrong as well, where its arguments are slices of larger"
            self.slices.append(Note(f"{batch_dims} was left out: {words} tensors"))
            return None

        yield from self._compare(
            self._form(batch_dims, "", self._names, fault),
            batch_dims,
            lambda: map_over(self.call, batched(loop.rows, dims), dims, batch_dims.out_dim),
        )

    def _wrong_for_slices(self, batch_dims: BatchDims, position: int) -> bool:
        """True if it is wrong without `vmap` too, for slices of the batch, which are not contiguous."""
        loop, dims = self.loop(batch_dims), batch_dims.dims
        batch = batched(loop.rows, dims)
        with Overlooking():  # it may raise for slices as well
            rows = [
                [value.select(dims[at], row) if at in dims else value for at, value in enumerate(batch)]
                for row in range(batch_dims.size)
            ]
            each = [self.call(row)[position] for row in rows]
            shapes = {None if one is None else one.shape for one in each}
            return len(shapes) > 1 or None in shapes or loop.fault(position, torch.stack(each)) is not None
        return True

    def gradients(self, batch_dims: BatchDims) -> Findings:
        """Compare the gradients of every example, and of the whole batch, with the loop's."""
        loop, subject, sample = self.loop(batch_dims), self.subject, self.sample
        if loop.varies or not all_finite(loop.expected):
            why = "vary in size" if loop.varies else "are not all finite"
            yield Note(f"gradients of {sample.brief} were left out: its results {why}")
            return
        argnums, count = differentiated(subject, sample).argnums, len(sample.flat)
        generator, rows = subject.generator(), []
        for row, results in zip(loop.rows, zip(*loop.columns, strict=True), strict=True):
            open_ = results_with_gradient(subject, sample, results)
            rows.append([*row, *random_grad_outputs(results, open_, generator)])
        grads = {at: 0 for at, grad in enumerate(rows[0][count:], count) if grad is not None}
        if not argnums or not grads:
            return
        dims = {**batch_dims.dims, **grads}
        one_by_one = partial(_pulled, self.call, argnums, count)

        def through() -> list[Tensor]:
            """The gradients of the whole batch, by a backward through `vmap`."""
            mapped = partial(map_over, self.call, dims=batch_dims.dims)
            found = zip(argnums, gradients_of(mapped, argnums, count, batched(rows, dims)), strict=True)
            return [grad.movedim(dims[argnum], 0) if argnum in dims else grad for argnum, grad in found]

        whole = frozenset(at for at, argnum in enumerate(argnums) if argnum not in dims)
        for words, summed, ask in (
            ("`vmap` of ", frozenset[int](), lambda: map_over(one_by_one, batched(rows, dims), dims)),
            ("a backward through `vmap`, ", whole, through),
        ):
            key = ("gradients", *sorted(dims), *sorted(summed), batch_dims.size)
            if key not in self.loops:
                self.loops[key] = Examples(subject, sample, rows, [*dims], argnums, self.dtype, summed)
            outputs = gradients_by(subject, sample, argnums, self._where)
            form = self._form(batch_dims, words, outputs, self.loops[key].fault)
            yield from self._compare(form, batch_dims, ask)

    def nested(self, batch_dims: BatchDims) -> Findings:
        """Nest two `vmap`s, with the batches in different dimensions."""
        loop, dims = self.loop(batch_dims, OUTER * SIZE), batch_dims.dims
        last = dict.fromkeys(dims, -1)
        batch = batched([batched(loop.rows[at * SIZE :][:SIZE], last) for at in range(OUTER)], dims)

        def ask() -> list[Tensor | None]:
            found = map_over(partial(map_over, self.call, dims=last), batch, dims)
            return [None if got is None else got.flatten(0, 1) for got in found]

        form = self._form(batch_dims, "under one `vmap` inside of another, ", self._names, loop.fault)
        yield from self._compare(form, batch_dims, ask)

    def without_examples(self, batch_dims: BatchDims) -> Findings:
        """Map a batch of no examples, if this is accepted."""
        none, flat = replace(batch_dims, size=0), self.sample.at(self.dtype)
        right = partial(_fault_of_equal, self.call(self.sample.at(self.dtype)), 0)
        found = attempt(lambda: map_over(self.call, _empty_batch(flat, none), none.dims))
        if isinstance(found, Raised):
            yield Note(f"a batch of no examples is refused: {found}")
            return
        for failure in self._form(none, "", self._names, right).failures(found, set()):
            if own_rule(self.subject) and not self._torch_loses_form(none, flat):
                yield failure
            else:
                got, expected = failure.evidence["got"], failure.evidence["expected"]
                words = f"of `{failure.input}`: {got}, where {expected} is right"
                yield Note(f"for a batch of no examples, torch's rules do not keep the form {words}")

    def _torch_loses_form(self, none: BatchDims, flat: Sequence[Any]) -> bool:
        """True if `vmap` of the reference, as a plain function, gives no examples another form as well."""
        reference = self.reference
        if reference is None:
            return False
        found = attempt(lambda: map_over(reference, _empty_batch(flat, none), none.dims))
        if isinstance(found, Raised):
            return False  # it is refused, so that no form is lost
        pairs = zip(found, reference([*flat]), strict=True)
        return any(form_fault(got, _repeated(one, 0)) is not None for got, one in pairs)

    def drawing(self, batch_dims: BatchDims) -> Findings:
        """Compare the form of what an operator draws, and equal examples under `randomness="same"`."""
        right = partial(_fault_of_equal, self.call(self.sample.at()), SIZE)
        batch = batched([self.sample.at()] * SIZE, batch_dims.dims)
        for randomness, words in (("same", "with randomness='same', "), ("different", "")):
            form = self._form(batch_dims, words, self._names, partial(right, same=bool(words)))
            ask = partial(map_over, self.call, batch, batch_dims.dims, randomness=randomness)
            yield from self._compare(form, batch_dims, ask)

    def _compare(
        self, form: Form, batch_dims: BatchDims, ask: Callable[[], Sequence[Tensor | None]]
    ) -> Findings:
        """Hold what a call under `vmap` gives to what is right, if `vmap` is not refused."""
        found = attempt(ask)
        if isinstance(found, Raised):
            yield from self._raised(batch_dims, found)
            return
        self.coverage.ran += 1
        yield from form.failures(found, self.coverage.wrong)

    def _raised(self, batch_dims: BatchDims, found: Raised) -> Findings:
        """Note a refusal of `vmap`, and report any other exception once."""
        subject, error = self.subject, found.error
        empty = any(isinstance(value, Tensor) and not value.numel() for value in self.sample.flat)
        reason = refusal(subject, error, empty=empty)
        if reason is None and self._reference_refused(batch_dims):
            reason = f"of the reference, which raises {found}"
        if reason is not None:
            self.coverage.refused[reason] = None
        elif None not in self.coverage.wrong:
            self.coverage.wrong.add(None)
            failure = raised(NAME, subject, error, str(self.sample))
            words = f"{rule_words(subject)} raises where calls for each example do not"
            if declares_rule(subject) and not inside_own_rule(subject, error) and not stated(error):
                by = "its own `vmap`" if own_rule(subject) else "`generate_vmap_rule = True`"
                words = f"by {by} it says that it can be mapped, and torch cannot map it"
            evidence = {**failure.evidence, "mapped over": str(batch_dims)}
            message = f"{words}: {failure.message}"
            yield replace(failure, message=message, where=self._where, evidence=evidence)

    def _reference_refused(self, batch_dims: BatchDims) -> bool:
        """True if `vmap` of the reference, as a plain function, raises as well."""
        if self.reference is None or own_rule(self.subject):
            return False
        batch = batched(self.loop(batch_dims).rows, batch_dims.dims)
        return isinstance(attempt(partial(map_over, self.reference, batch, batch_dims.dims)), Raised)

    @property
    def _where(self) -> str:
        return self.subject.specification.where_of("vmap")

    @property
    def _names(self) -> list[TensorName]:
        return results_of(self.subject, self.sample, self._where)

    def _form(
        self,
        batch_dims: BatchDims,
        words: str,
        outputs: Sequence[TensorName],
        fault: Callable[[int, Any], Fault | None],
    ) -> Form:
        dtype = str(self.dtype or own_dtype(self.sample)).removeprefix("torch.")
        evidence = {"sample": f"{self.sample} in {dtype}", "mapped over": str(batch_dims)}
        prefix, than = (
            f"{rule_words(self.subject)} is wrong: {words}",
            "is not what a loop over the examples gives",
        )
        return Form(NAME, prefix, than, outputs, fault, evidence)


def _pulled(call: Function, argnums: Sequence[int], count: int, flat: list[Any]) -> Sequence[Tensor]:
    """The gradients by `torch.func.vjp`, from flat arguments and the grad_outputs behind them."""

    def results(*given: Tensor) -> tuple[Tensor, ...]:
        values = list(flat[:count])
        for argnum, value in zip(argnums, given, strict=True):
            values[argnum] = value.clone()  # it may write into it
        pairs = zip(call(values), flat[count:], strict=True)
        return tuple(result for result, grad in pairs if result is not None and grad is not None)

    pull = torch.func.vjp(results, *(flat[argnum] for argnum in argnums))[1]
    found: Sequence[Tensor] = pull(tuple(tensors_in(flat[count:])))
    return found


def _empty_batch(flat: Sequence[Any], batch_dims: BatchDims) -> list[Any]:
    """The flat arguments of a batch of no examples."""
    dims = batch_dims.dims
    batch = batched([flat], dims)
    return [value.narrow(dims[at], 0, 0) if at in dims else value for at, value in enumerate(batch)]


def _repeated(result: Tensor | None, count: int) -> Tensor | None:
    """A batch of equal results."""
    return None if result is None else result.expand(count, *result.shape)


def _fault_of_equal(
    results: Sequence[Tensor | None], count: int, position: int, got: Any, *, same: bool = False
) -> Fault | None:
    """The fault of a batch of equal examples: of its form, or where they differ and must be the same."""
    fault = form_fault(got, _repeated(results[position], count))
    if fault is None and same and got is not None and any(_differs(got[0], each) for each in got):
        return Fault("result", "another one for equal examples", "the same one")
    return fault


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
