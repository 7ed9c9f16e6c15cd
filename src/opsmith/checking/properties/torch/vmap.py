"""`torch.func.vmap`: results and gradients are those of a loop, in whatever dimension the batch lies.

Batched gradients, of several grad_outputs for one call, are those of each: by `vmap` over a backward.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import differentiated
from opsmith.checking.exceptions import stated
from opsmith.checking.numerics.autodiff import differentiate, has_gradient
from opsmith.checking.promises import of_batches, of_tools
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
from opsmith.checking.property import (
    REFUSED,
    Coverage,
    Findings,
    Note,
    Property,
    Skipped,
    covered_samples,
    first_line,
    raised,
)
from opsmith.checking.report import Failure
from opsmith.checking.run import TensorName, record_copies
from opsmith.checking.samples.batches import all_finite, batch_of, batched, own_dtype, working_dtype
from opsmith.checking.samples.grad_outputs import random_grad_outputs, results_with_gradient
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject, drawing_operations
from opsmith.core.cached_property import cached_property
from opsmith.core.call_arguments import tensors_in
from opsmith.judging.compare import all_close, exact_difference, share_of_largest
from opsmith.judging.constants import allowed_roundings, unit_roundoff
from opsmith.judging.tensors import is_inexact
from opsmith.torch_library.torch_messages import NO_BATCHING_RULE, has_message

NAME, GRADIENTS = "vmap", "batched_gradients"

SIZE = 3
"""Number of examples."""

OUTER = 2
"""Number of examples of the outer of two nested `vmap`s."""


@dataclass(frozen=True)
class BatchDims:
    """One way to batch the arguments of a sample.

    Args:
        dims: Batch dimension of each batched argument, by its position.
        labels: Name in messages of each tensor argument, by its position.
        out_dim: Batch dimension of the results.
        size: Number of examples.
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

    def over(self, function: Function, rows: Sequence[Sequence[Any]]) -> list[Tensor | None]:
        """The results of a function for examples under `vmap`, the batch first; for none if the size is 0."""
        batch = batched(rows, self.dims)
        if not self.size:
            batch = [
                value.narrow(self.dims[argnum], 0, 0) if argnum in self.dims else value
                for argnum, value in enumerate(batch)
            ]
        return map_over(function, batch, self.dims, self.out_dim)


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
    yield BatchDims(dict.fromkeys(argnums, 0), labels)
    yield BatchDims(dict.fromkeys(argnums, -1), labels, out_dim=-1)
    if len(argnums) > 1:
        yield from (BatchDims({argnum: 0}, labels) for argnum in (argnums if every else argnums[-1:]))
    if not every:
        return
    yield BatchDims({argnum: min(1, sample.flat[argnum].dim()) for argnum in argnums}, labels)
    if len(argnums) > 1:
        yield BatchDims({argnum: -1 if at % 2 else 0 for at, argnum in enumerate(argnums)}, labels)
    yield BatchDims(dict.fromkeys(argnums, 0), labels, size=1)


def map_over(
    function: Function,
    batch: Sequence[Any],
    dims: Mapping[int, int],
    out_dim: int = 0,
    randomness: str = "error",
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
    declared = specification.batching
    makes = "follows from the reference" if declared is None else f"batching={declared!r} makes"
    return f"the rule for `vmap` that {makes}"


def declares_rule(subject: Subject) -> bool:
    """True if a class that is called through `apply` says that it can be mapped.

    It has a rule of its own, or `generate_vmap_rule = True`.
    """
    origin = subject.specification.origin
    return subject.kind.applied and (
        origin.own("vmap") is not None or bool(getattr(origin.subject, "generate_vmap_rule", False))
    )


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
    frames = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return code is not None and any(each is code for each in frames)


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
        loop = self.loop(batch_dims)

        def fault(position: int, got: Tensor | None) -> Fault | None:
            found = loop.fault(position, got)
            if found is None or not self._wrong_for_slices(batch_dims, position):
                return found
            words = "a call for one example alone is wrong as well, where its arguments are slices of larger"
            self.slices.append(Note(f"{batch_dims} was left out: {words} tensors"))
            return None

        form = self._form(batch_dims, "", self._names, fault)
        yield from self._compare(form, batch_dims, partial(batch_dims.over, self.call, loop.rows))

    def _wrong_for_slices(self, batch_dims: BatchDims, position: int) -> bool:
        """True if it is wrong without `vmap` too, for slices of the batch, which are not contiguous."""
        loop, dims = self.loop(batch_dims), batch_dims.dims
        batch = batched(loop.rows, dims)
        rows = [
            [value.select(dims[at], row) if at in dims else value for at, value in enumerate(batch)]
            for row in range(batch_dims.size)
        ]
        each = attempt(lambda: [self.call(row)[position] for row in rows])
        if isinstance(each, Raised) or len({None if one is None else one.shape for one in each}) > 1:
            return True
        return each[0] is None or loop.fault(position, torch.stack(each)) is not None

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
        every = replace(batch_dims, dims={**batch_dims.dims, **grads}, out_dim=0)
        dims, one_by_one = every.dims, partial(_pulled, self.call, argnums, count)

        def through() -> list[Tensor]:
            """The gradients of the whole batch, by a backward through `vmap`."""
            mapped = partial(map_over, self.call, dims=batch_dims.dims)
            found = zip(argnums, gradients_of(mapped, argnums, count, batched(rows, dims)), strict=True)
            return [grad.movedim(dims[argnum], 0) if argnum in dims else grad for argnum, grad in found]

        whole = frozenset(at for at, argnum in enumerate(argnums) if argnum not in dims)
        for words, summed, ask in (
            ("`vmap` of ", frozenset[int](), partial(every.over, one_by_one, rows)),
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
        loop, last = self.loop(batch_dims, OUTER * SIZE), dict.fromkeys(batch_dims.dims, -1)
        rows = [batched(loop.rows[at * SIZE :][:SIZE], last) for at in range(OUTER)]

        def ask() -> list[Tensor | None]:
            found = batch_dims.over(partial(map_over, self.call, dims=last), rows)
            return [None if got is None else got.flatten(0, 1) for got in found]

        form = self._form(batch_dims, "under one `vmap` inside of another, ", self._names, loop.fault)
        yield from self._compare(form, batch_dims, ask)

    def without_examples(self, batch_dims: BatchDims) -> Findings:
        """Map a batch of no examples, if this is accepted."""
        none, flat = replace(batch_dims, size=0), self.sample.at(self.dtype)
        right = partial(_fault_of_equal, self.call(self.sample.at(self.dtype)), 0)
        found = attempt(partial(none.over, self.call, [flat]))
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

    def _torch_loses_form(self, none: BatchDims, flat: list[Any]) -> bool:
        """True if `vmap` of the reference, as a plain function, gives no examples another form as well."""
        found = None if self.reference is None else attempt(partial(none.over, self.reference, [flat]))
        if self.reference is None or found is None or isinstance(found, Raised):
            return False  # of what is refused, no form is lost
        pairs = zip(found, self.reference([*flat]), strict=True)
        return any(form_fault(got, _repeated(one, 0)) is not None for got, one in pairs)

    def drawing(self, batch_dims: BatchDims) -> Findings:
        """Compare the form of what an operator draws, and equal examples under `randomness="same"`."""
        right = partial(_fault_of_equal, self.call(self.sample.at()), SIZE)
        batch, dims = batched([self.sample.at()] * SIZE, batch_dims.dims), batch_dims.dims
        for randomness, words in (("same", "with randomness='same', "), ("different", "")):
            form = self._form(batch_dims, words, self._names, partial(right, same=bool(words)))
            ask = partial(map_over, self.call, batch, dims, randomness=randomness)
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
        rows = self.loop(batch_dims).rows
        return isinstance(attempt(partial(batch_dims.over, self.reference, rows)), Raised)

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
        than = "is not what a loop over the examples gives"
        return Form(NAME, f"{rule_words(self.subject)} is wrong: {words}", than, outputs, fault, evidence)


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


def _batched_gradients(subject: Subject, sample: Sample, coverage: Coverage) -> Findings:
    """Differentiate every sample with a batch of grad_outputs, and with each of them alone."""
    late = subject.rank(sample) >= subject.effort.batched_samples
    argnums = () if late else differentiated(subject, sample).argnums
    if not argnums:
        return
    dtype, call = working_dtype(subject, sample), partial(subject.call, sample)
    flat = sample.at(dtype)
    results = record_copies(call, flat, argnums)[1]
    open_ = [has_gradient(each) for each in results]
    if not any(open_):
        return
    generator = subject.generator()
    rows = [[*flat, *random_grad_outputs(results, open_, generator)] for _ in range(SIZE)]
    taking = [at for at, takes in enumerate(open_, len(flat)) if takes]
    right = Examples(subject, sample, rows, taking, argnums, dtype, functions=[call])

    def together(transform: Transform) -> list[Tensor]:
        """The gradients of one call for every grad_output, zeros where autograd has none."""
        batch = batched(rows, dict.fromkeys(taking, 0))
        leaves, results = record_copies(call, batch[: len(flat)], argnums)
        inputs = [leaves[argnum] for argnum in argnums]
        found = transform([results[at - len(flat)] for at in taking], inputs, [batch[at] for at in taking])
        return [
            each.new_zeros((SIZE, *each.shape)) if gradient is None else gradient
            for gradient, each in zip(found, inputs, strict=True)
        ]

    outputs, than = gradients_by(subject, sample, argnums), "is not what each grad_output gives alone"
    for words, transform in (
        ("with `vmap` over a backward", _over_backward),
        ("with `is_grads_batched=True`", partial(differentiate, is_grads_batched=True)),
    ):
        found = attempt(partial(together, transform))
        if isinstance(found, Raised):
            coverage.refused[f"{words} is refused: {found}"] = None
            return  # what `vmap` refuses, as `grad.data`, can kill the process by `is_grads_batched`
        coverage.ran += 1
        evidence = {"sample": str(sample), "grad_outputs": SIZE}
        form = Form(GRADIENTS, f"{words}, ", than, outputs, right.fault, evidence)
        yield from form.failures(found, coverage.wrong)


Transform = Callable[[list[Tensor], list[Tensor], list[Tensor]], Sequence[Tensor | None]]
"""Function from results, inputs and batches of grad_outputs to gradients."""


def _over_backward(
    results: list[Tensor], inputs: list[Tensor], grads: list[Tensor]
) -> Sequence[Tensor | None]:
    backward = partial(torch.autograd.grad, results, inputs, allow_unused=True)
    return map_over(backward, grads, dict.fromkeys(range(len(grads)), 0))


VMAP = Property(
    NAME,
    "a batch under torch.func.vmap gives what a loop gives, wherever it lies",
    run,
    inputs="few",
    traits=("transforms", "reruns"),
    given=of_batches,
)

BATCHED_GRADIENTS = Property(
    GRADIENTS,
    "several grad_outputs at once give what each gives alone",
    partial(covered_samples, GRADIENTS, _batched_gradients, "there is nothing to differentiate"),
    traits=("transforms", "reruns"),
    given=of_tools,
)
