"""`torch.func.vmap`: results and gradients equal those of a loop, for every batch dimension.

Batched gradients of one call for several grad_outputs, by `vmap` over a backward, equal the gradients for
each grad_output. If `batching=` is declared, one call for a batch has the same results as a call for each
example.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import Raised, attempt, error_words, first_line, stated
from opsmith.checking.numerics.autodiff import differentiate, has_gradient, vjp_or_zeros
from opsmith.checking.promises import of_batches, of_tools
from opsmith.checking.property import REFUSED, Findings, Note, Property, Skipped
from opsmith.checking.report import Failure
from opsmith.checking.run import Coverage, Run, TensorName, covered_runs, each_run
from opsmith.checking.samples.batches import all_finite, batch_of, batched, working_dtype
from opsmith.checking.samples.grad_outputs import random_grad_outputs, results_with_gradient
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject, drawing_operations
from opsmith.checking.ways import Examples, Function, compare_outputs, reference_of
from opsmith.core.cached_property import cached_property
from opsmith.core.call_arguments import tensors_in
from opsmith.core.shapes import ELEMENTWISE, leads
from opsmith.core.specification import Specification
from opsmith.judging.compare import Difference, exact_difference, form_difference, within_rounding
from opsmith.judging.constants import allowed_roundings, unit_roundoff
from opsmith.judging.tensors import is_inexact
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.vmap import batched_call
from opsmith.torch_library.torch_messages import NO_BATCHING_RULE, has_message

NAME, GRADIENTS, BATCHED = "vmap", "batched_gradients", "batching"

SIZE = 3
"""Number of examples."""

OUTER = 2
"""Number of examples of the outer of two nested `vmap`s."""


@dataclass(frozen=True)
class BatchDims:
    """A choice of batched arguments of a sample, with their batch dimensions.

    Args:
        dims: Batch dimension of each batched argument, by its position.
        labels: Name of each tensor argument in messages, by its position.
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
        """The results of a function for examples under `vmap`, batch first; no examples if `size` is 0."""
        batch = batched(rows, self.dims)
        if not self.size:
            batch = [
                value.narrow(self.dims[argnum], 0, 0) if argnum in self.dims else value
                for argnum, value in enumerate(batch)
            ]
        return map_over(function, batch, self.dims, self.out_dim)


def batch_choices(sample: Sample, *, every: bool) -> Iterator[BatchDims]:
    """Choices of batched arguments (all, each alone) and of dimensions (first, last, mixed).

    Args:
        sample: The sample.
        every: True to yield all choices; else the choices that differ most.
    """
    labels = {at: sample.labels[at] for at, value in enumerate(sample.flat) if isinstance(value, Tensor)}
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
    """The results of a function under `vmap`, with the batch in the first dimension; None stays None.

    Args:
        function: Function from flat arguments to results.
        batch: Flat arguments.
        dims: Batch dimension of each batched argument.
        out_dim: Dimension in which `vmap` puts the batch.
        randomness: As for `vmap`.
    """
    present: list[bool] = []

    def call(*flat: Any) -> tuple[Tensor, ...]:
        results = list(function([*flat]))
        present[:] = [result is not None for result in results]
        return tuple(tensors_in(results))

    over = torch.func.vmap(call, tuple(map(dims.get, range(len(batch)))), out_dim, randomness)
    found = iter(over(*batch))
    return [next(found).movedim(out_dim, 0) if is_there else None for is_there in present]


def rule_words(subject: Subject) -> str:
    """Description of the rule that computes a batch."""
    specification = subject.specification
    if subject.kind.applied or specification.origin.registered:
        if specification.origin.own("vmap"):
            return "its own rule for `vmap`"
        return "the rule for `vmap` that torch derives from its forward" if subject.kind.applied else "`vmap`"
    declared = specification.batching
    makes = "follows from the reference" if declared is None else f"batching={declared!r} makes"
    return f"the rule for `vmap` that {makes}"


def declares_rule(subject: Subject) -> bool:
    """True if a class that is called through `apply` declares that it can be mapped.

    It has a rule of its own, or `generate_vmap_rule = True`.
    """
    origin = subject.specification.origin
    return subject.kind.applied and (
        origin.own("vmap") is not None or bool(getattr(origin.subject, "generate_vmap_rule", False))
    )


def own_rule(subject: Subject) -> bool:
    """True if the author wrote a rule for batches, or declares that one call computes a batch."""
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
        return None  # it promises a feature that torch refuses
    if has_message(error, NO_BATCHING_RULE) or (empty and not own_rule(subject)):
        return error_words(error)
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
            "the operator has no rule for `vmap`: torch calls it for each example; register a rule "
            "by `register_vmap`"
        )
        return
    unchecked = "no sample has a tensor to batch"
    for finding in covered_runs(NAME, _mapped, unchecked, subject, noted="a part is refused: "):
        yield finding
        # A class that is called by `apply` need not support it.
        if isinstance(finding, Skipped) and finding.reason != unchecked and not subject.kind.applied:
            message = f"the operator cannot be mapped: {finding.reason}"
            location = subject.specification.where_of("vmap")
            yield Failure(NAME, None, "raises", message, location, {REFUSED: "in every sample"})


def _mapped(run: Run, coverage: Coverage) -> Findings:
    subject, sample = run.subject, run.sample
    if not any(isinstance(value, Tensor) for value in sample.flat):
        return
    if any(isinstance(value, torch.Generator) for value in sample.flat):
        yield Note("a sample with a generator was left out: torch does not define how it serves a batch")
        return
    every = subject.rank(sample) < subject.effort.transform_samples
    mapped = MappedSample(replace(run, dtype=working_dtype(subject, sample)), coverage)
    chosen = [*batch_choices(sample, every=every)]
    if subject.draws or drawing_operations(subject, sample):
        yield from mapped.drawing(chosen[0])
        return
    for batch_dims in chosen:
        yield from mapped.results(batch_dims)
    yield from mapped.slices
    if coverage.wrong or mapped.slices or not coverage.ran:
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
        run: Run of the sample, in the dtype in which it is mapped.
        coverage: Progress of the property; `wrong` contains None if a call under `vmap` raised.
        slices: Notes on batches of which each slice gives wrong results without `vmap` as well.
        loops: Known examples, by the arguments in which they differ.
    """

    run: Run
    coverage: Coverage
    slices: list[Note] = field(default_factory=list)
    loops: dict[tuple[Any, ...], Examples] = field(default_factory=dict)

    @cached_property
    def reference(self) -> Function | None:
        """The reference, if it computes batches; None if the operator itself does."""
        return reference_of(self.run)

    def call(self, flat: Sequence[Any]) -> list[Any]:
        """The results of one example."""
        return self.run.subject.call(self.run.sample, flat)

    def loop(self, batch_dims: BatchDims, size: int = 0) -> Examples:
        """Cached examples that differ in some arguments, with their results."""
        run, key = self.run, (*sorted(batch_dims.dims), size or batch_dims.size)
        if key not in self.loops:
            rows = batch_of(run.subject, run.sample, key[:-1], key[-1], run.dtype)
            self.loops[key] = Examples(run, rows, key[:-1])
        return self.loops[key]

    def results(self, batch_dims: BatchDims) -> Findings:
        """Map the sample with one choice of dimensions, and compare every result with the loop's."""
        loop = self.loop(batch_dims)

        def fault(position: int, got: Tensor | None) -> Difference | None:
            found = loop.fault(position, got)
            if found is None or not self._wrong_for_slices(batch_dims, position):
                return found
            words = "a call for one example is also wrong if its arguments are slices of larger"
            self.slices.append(Note(f"{batch_dims} was left out: {words} tensors"))
            return None

        yield from self._compare(batch_dims, "", partial(batch_dims.over, self.call, loop.rows), fault)

    def _wrong_for_slices(self, batch_dims: BatchDims, position: int) -> bool:
        """True if results are wrong without `vmap` too, for slices of the batch, which are not contiguous."""
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
        loop, run = self.loop(batch_dims), self.run
        if loop.varies or not all_finite(loop.expected):
            why = "vary in size" if loop.varies else "are not all finite"
            yield Note(f"gradients of {run.sample.brief} were left out: its results {why}")
            return
        argnums, count = run.argnums, len(run.sample.flat)
        generator, rows = run.subject.generator(), []
        for row, results in zip(loop.rows, zip(*loop.columns, strict=True), strict=True):
            open_ = results_with_gradient(run.subject, run.sample, results)
            rows.append([*row, *random_grad_outputs(results, open_, generator)])
        grads = {at: 0 for at, grad in enumerate(rows[0][count:], count) if grad is not None}
        if not argnums or not grads:
            return
        every = replace(batch_dims, dims={**batch_dims.dims, **grads}, out_dim=0)
        dims, one_by_one = every.dims, partial(_pulled, self.call, argnums, count)

        def through() -> list[Tensor]:
            """The gradients of the whole batch, by a backward through `vmap`."""
            mapped: Function = partial(map_over, self.call, dims=batch_dims.dims)
            batch = batched(rows, dims)
            found = zip(argnums, vjp_or_zeros(mapped, batch[:count], argnums, batch[count:]), strict=True)
            return [grad.movedim(dims[argnum], 0) if argnum in dims else grad for argnum, grad in found]

        whole = frozenset(at for at, argnum in enumerate(argnums) if argnum not in dims)
        for words, summed, ask in (
            ("`vmap` of ", frozenset[int](), partial(every.over, one_by_one, rows)),
            ("a backward through `vmap`, ", whole, through),
        ):
            key = ("gradients", *sorted(dims), *sorted(summed), batch_dims.size)
            if key not in self.loops:
                self.loops[key] = Examples(run, rows, [*dims], gradients=True, summed=summed)
            yield from self._compare(
                batch_dims, words, ask, self.loops[key].fault, self._names[-len(argnums) :]
            )

    def nested(self, batch_dims: BatchDims) -> Findings:
        """Nest two `vmap`s, with the batches in different dimensions."""
        loop, last = self.loop(batch_dims, OUTER * SIZE), dict.fromkeys(batch_dims.dims, -1)
        rows = [batched(loop.rows[at * SIZE :][:SIZE], last) for at in range(OUTER)]

        def ask() -> list[Tensor | None]:
            found = batch_dims.over(partial(map_over, self.call, dims=last), rows)
            return [None if got is None else got.flatten(0, 1) for got in found]

        yield from self._compare(batch_dims, "under one `vmap` inside of another `vmap`, ", ask, loop.fault)

    def without_examples(self, batch_dims: BatchDims) -> Findings:
        """Map a batch without examples, if this is accepted."""
        none, flat = replace(batch_dims, size=0), self.run.flat()
        right = partial(_fault_of_equal, self.call(self.run.flat()), 0)
        found = attempt(partial(none.over, self.call, [flat]))
        if isinstance(found, Raised):
            yield Note(f"an empty batch is refused: {found}")
            return
        for failure in self._compare(none, "", lambda: found, right, wrong=set()):
            assert isinstance(failure, Failure)
            if own_rule(self.run.subject) and not self._torch_loses_form(none, flat):
                yield failure
            else:
                got, expected = failure.evidence["got"], failure.evidence["expected"]
                words = f"of `{failure.input}`: {got}, where {expected} is right"
                yield Note(f"for an empty batch, torch's rules do not keep the form {words}")

    def _torch_loses_form(self, none: BatchDims, flat: list[Any]) -> bool:
        """True if `vmap` of the reference, as a plain function, also changes the form for an empty batch."""
        found = None if self.reference is None else attempt(partial(none.over, self.reference, [flat]))
        if self.reference is None or found is None or isinstance(found, Raised):
            return False  # a refused batch loses no form
        pairs = zip(found, self.reference([*flat]), strict=True)
        return any(form_difference(got, _repeated(one, 0)) is not None for got, one in pairs)

    def drawing(self, batch_dims: BatchDims) -> Findings:
        """Compare the form of an operator's random results, and equal examples under `randomness="same"`."""
        sample, dims = self.run.sample, batch_dims.dims
        right, batch = (
            partial(_fault_of_equal, self.call(sample.at()), SIZE),
            batched([sample.at()] * SIZE, dims),
        )
        for randomness, words in (("same", "with randomness='same', "), ("different", "")):
            ask = partial(map_over, self.call, batch, dims, randomness=randomness)
            yield from self._compare(batch_dims, words, ask, partial(right, same=bool(words)))

    def _compare(
        self,
        batch_dims: BatchDims,
        words: str,
        ask: Callable[[], Sequence[Tensor | None]],
        fault: Callable[[int, Any], Difference | None],
        outputs: Sequence[TensorName] = (),
        wrong: set[str | None] | None = None,
    ) -> Findings:
        """Compare a call's outputs under `vmap`, by default its results, with the right outputs."""
        found = attempt(ask)
        if isinstance(found, Raised):
            yield from self._raised(batch_dims, found)
            return
        self.coverage.ran += 1
        form = (
            f"{rule_words(self.run.subject)} is wrong: {words}{{}} is not what a loop over the examples gives"
        )
        named = outputs or self._names[: len(self._names) - len(self.run.argnums)]
        known, over = self.coverage.wrong if wrong is None else wrong, {"mapped over": str(batch_dims)}
        yield from compare_outputs(self.run, form, named, found, fault, known, **over)

    def _raised(self, batch_dims: BatchDims, found: Raised) -> Findings:
        """Note a refusal of `vmap`, and report any other exception once."""
        subject, error = self.run.subject, found.error
        empty = any(isinstance(value, Tensor) and not value.numel() for value in self.run.sample.flat)
        reason = refusal(subject, error, empty=empty)
        if reason is None and self._reference_refused(batch_dims):
            reason = f"the reference raises {found}"
        if reason is not None:
            self.coverage.refused[reason] = None
        elif None not in self.coverage.wrong:
            self.coverage.wrong.add(None)
            failure = self.run.raised(error)
            words = f"{rule_words(subject)} raises, but calls for each example do not"
            if declares_rule(subject) and not inside_own_rule(subject, error) and not stated(error):
                by = "its own `vmap`" if own_rule(subject) else "`generate_vmap_rule = True`"
                words = f"the class declares by {by} that it can be mapped, but torch cannot map it"
            evidence = {**failure.evidence, "mapped over": str(batch_dims)}
            message, where = f"{words}: {failure.message}", subject.specification.where_of("vmap")
            yield replace(failure, message=message, where=where, evidence=evidence)

    def _reference_refused(self, batch_dims: BatchDims) -> bool:
        """True if `vmap` of the reference, as a plain function, raises as well."""
        if self.reference is None or own_rule(self.run.subject):
            return False
        rows = self.loop(batch_dims).rows
        return isinstance(attempt(partial(batch_dims.over, self.reference, rows)), Raised)

    @cached_property
    def _names(self) -> list[TensorName]:
        return self.run.names(self.run.subject.specification.where_of("vmap"))


def _pulled(call: Function, argnums: Sequence[int], count: int, flat: list[Any]) -> Sequence[Tensor]:
    """The gradients by `torch.func.vjp`, from flat arguments followed by the grad_outputs."""

    def results(*given: Tensor) -> tuple[Tensor, ...]:
        values = list(flat[:count])
        for argnum, value in zip(argnums, given, strict=True):
            values[argnum] = value.clone()  # the function may write into it
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
) -> Difference | None:
    """The difference of a batch of equal examples: its form, or examples that differ but must be equal."""
    fault = form_difference(got, _repeated(results[position], count))
    if fault is None and same and got is not None and any(_differs(got[0], each) for each in got):
        return Difference((), "different for equal examples", "the same", aspect="result")
    return fault


def _differs(first: Tensor, other: Tensor) -> bool:
    """True if results of equal examples differ by more than rounding, for example in random numbers.

    torch may round the last elements of a batch differently, since they do not fill a vector.
    """
    if not is_inexact(first):
        return exact_difference(first, other) is not None
    return not within_rounding(other, first, allowed_roundings(first.numel()) * unit_roundoff(first.dtype))


def _batched_gradients(run: Run, coverage: Coverage) -> Findings:
    """Differentiate every sample for a batch of grad_outputs, and for each grad_output alone."""
    subject, sample = run.subject, run.sample
    if subject.rank(sample) >= subject.effort.batched_samples or not run.argnums:
        return
    run = replace(run, dtype=working_dtype(subject, sample))
    flat, results = run.flat(), run.call().results
    open_ = [has_gradient(each) for each in results]
    if not any(open_):
        return
    generator = subject.generator()
    rows = [[*flat, *random_grad_outputs(results, open_, generator)] for _ in range(SIZE)]
    taking = [at for at, takes in enumerate(open_, len(flat)) if takes]
    right = Examples(run, rows, taking, gradients=True, functions=[partial(subject.call, sample)])

    def together(transform: Transform) -> list[Tensor]:
        """The gradients of one call for every grad_output; zeros where autograd returns none."""
        batch = batched(rows, dict.fromkeys(taking, 0))
        call = run.call(batch[: len(flat)])
        found = transform(call.outputs, call.inputs, [batch[at] for at in taking])
        return [
            each.new_zeros((SIZE, *each.shape)) if gradient is None else gradient
            for gradient, each in zip(found, call.inputs, strict=True)
        ]

    for words, transform in (
        ("with `vmap` over a backward", _over_backward),
        ("with `is_grads_batched=True`", partial(differentiate, is_grads_batched=True)),
    ):
        found = attempt(partial(together, transform))
        if isinstance(found, Raised):
            coverage.refused[f"{words} is refused: {found}"] = None
            return  # code that `vmap` refuses, such as `grad.data`, may kill the process in this way
        coverage.ran += 1
        form, outputs = f"{words}, {{}} is not what each grad_output gives alone", run.names()[len(open_) :]
        yield from compare_outputs(run, form, outputs, found, right.fault, coverage.wrong, grad_outputs=SIZE)


Transform = Callable[[list[Tensor], list[Tensor], list[Tensor]], Sequence[Tensor | None]]
"""Function from results, inputs and batches of grad_outputs to gradients."""


def _over_backward(
    results: list[Tensor], inputs: list[Tensor], grads: list[Tensor]
) -> Sequence[Tensor | None]:
    backward = partial(torch.autograd.grad, results, inputs, allow_unused=True)
    return map_over(backward, grads, dict.fromkeys(range(len(grads)), 0))


def _declared(subject: Subject) -> Findings:
    """Compute a batch made from each sample by one call, and each of its examples alone."""
    if subject.specification.batching is None:
        yield Skipped("the operator declares no `batching=`")
    elif subject.draws:
        yield Skipped(
            "the operator draws random numbers, and their order differs between one call and many calls"
        )
    else:
        yield from each_run(BATCHED, _batches, subject)


def _batches(run: Run) -> Findings:
    run, subject, sample = replace(run, dtype=torch.float64), run.subject, run.sample
    specification, wrong = subject.specification, set[str | None]()
    names = [TensorName(each.name, "result", specification.where) for each in subject.every(sample)]
    for argnums in _leading(specification, sample):
        rows = batch_of(subject, sample, argnums, SIZE, run.dtype)
        right = Examples(run, rows, argnums, functions=[partial(subject.reference, sample)])
        over = dict.fromkeys(argnums, 0)
        batch = batched(rows, over)
        found: list[Sequence[Tensor | None]] = []
        dims = [over.get(argnum) for argnum in range(len(batch))]
        whole = batched_call(specification, sample.flattening, batch, dims, SIZE, "error")
        if whole is not None:
            found.append(whole.restore(subject.reference(sample, whole.flat), [each.name for each in names]))
        if specification.batching == ELEMENTWISE and len(argnums) == len(tensors_in(rows[0])):
            # Each position keeps its own value in any dimension, also in a new last dimension.
            last = subject.reference(sample, batched(rows, dict.fromkeys(argnums, -1)))
            found.append([each.movedim(-1, 0) for each in last])
        if specification.opaque and not capabilities.on("torch_func"):
            yield Note("`vmap` was left out: for an opaque operator, it needs the capability `torch_func`")
        else:
            mapped = map_over(partial(subject.call, sample), batch, over)
            visible = dict(zip(subject.visible_positions(sample), mapped, strict=True))
            found.append([visible.get(at, each) for at, each in enumerate(right.expected)])
        labels = ", ".join(f"`{sample.labels[argnum]}`" for argnum in argnums)
        form = f"batching={specification.batching!r} is wrong: in a batch of {labels}, {{}} is not what each "
        for outputs in found:
            yield from compare_outputs(run, f"{form}example gives alone", names, outputs, right.fault, wrong)


def _leading(specification: Specification, sample: Sample) -> Iterator[tuple[int, ...]]:
    """Yield the arguments to batch: all that can be batched, together and each alone."""
    batching, shapes = specification.batching, specification.shapes

    def leading(name: str) -> bool:
        return shapes is not None and batching is not None and leads(batching, shapes, name)

    argnums = tuple(
        argnum
        for argnum, (name, value) in enumerate(zip(sample.names, sample.flat, strict=True))
        if isinstance(value, Tensor) and (batching == ELEMENTWISE or leading(name))
    )
    yield argnums
    if len(argnums) > 1:
        yield from ((argnum,) for argnum in argnums)


VMAP = Property(
    NAME,
    "a batch under torch.func.vmap gives what a loop gives, for every batch dimension",
    run,
    inputs="few",
    traits=("transforms", "reruns"),
    given=of_batches,
)

BATCHED_GRADIENTS = Property(
    GRADIENTS,
    "one backward for several grad_outputs gives what one backward for each gives",
    partial(covered_runs, GRADIENTS, _batched_gradients, "there is nothing to differentiate"),
    traits=("transforms", "reruns"),
    given=of_tools,
)

BATCHING = Property(BATCHED, "one call for a batch gives what one call for each example gives", _declared)
