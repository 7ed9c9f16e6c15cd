"""Batched gradients: several grad_outputs at once give what each gives alone, by a backward under `vmap`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import computed_in, differentiated, record_copies, rule_location
from opsmith.checking.exceptions import refuse_own
from opsmith.checking.numerics.autodiff import differentiate, has_gradient, vjp_or_zeros
from opsmith.checking.promises import of_tools
from opsmith.checking.properties.torch.mapping import SIZE, ExampleLoop, OneByOne, map_over
from opsmith.checking.property import Coverage, Findings, Property, covered_samples, first_line
from opsmith.checking.report import Failure
from opsmith.checking.samples.batches import batched, own_dtype, replicas, working_dtype
from opsmith.checking.samples.grad_outputs import random_grad_outputs, results_with_gradient
from opsmith.checking.samples.sample import Sample, is_inexact
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.checking.subject import Subject
from opsmith.core.cached_property import cached_property
from opsmith.core.call_arguments import tensors_in

NAME = "batched_gradients"


def _sample(subject: Subject, sample: Sample, coverage: Coverage) -> Findings:
    """Differentiate every sample with a batch of grad_outputs, and with each of them alone."""
    late = subject.rank(sample) >= subject.effort.batched_samples
    argnums = () if late else differentiated(subject, sample).argnums
    if not argnums:
        return
    dtype = working_dtype(subject, sample)
    flat = sample.at(dtype)
    call = partial(subject.call, sample)
    results = record_copies(call, flat, argnums)[1]
    open_ = [is_inexact(each) and each.requires_grad for each in results]
    generator = subject.generator()
    grads = [random_grad_outputs(results, open_, generator) for _ in range(SIZE)]
    if not any(open_):
        return
    count = len(flat)
    rows = [[*flat, *each] for each in grads]
    differing = [count + at for at, o in enumerate(open_) if o]
    loop = ExampleLoop(
        partial(gradients_of, call, argnums, count),
        rows,
        differing,
        generator,
        subject.has_truth,
        dtype or own_dtype(sample),
        computed_in=partial(computed_in, subject, sample),
    )
    batch = [torch.stack(tensors_in([row[at] for row in grads])) for at, o in enumerate(open_) if o]
    wrong: set[str] = set()
    for words, together in _ways(call, flat, argnums, batch):
        try:
            with without_warnings():
                found = together()
        except Exception as error:
            refuse_own(error)
            coverage.refused[f"{words} is refused: {type(error).__name__}: {first_line(error)}"] = None
            return  # what `vmap` refuses, as `grad.data`, can kill the process by `is_grads_batched`
        coverage.ran += 1
        for position, (argnum, got) in enumerate(zip(argnums, found, strict=True)):
            label = sample.labels[argnum]
            fault = loop.fault(position, got)
            if fault is None or label in wrong:
                continue
            wrong.add(label)
            yield Failure(
                NAME,
                label,
                fault.cause,
                f"{words}, the gradient of `{label}` is not what each grad_output gives alone: {fault}",
                rule_location(subject, sample.names[argnum]),
                {"sample": str(sample), "grad_outputs": SIZE, **fault.evidence()},
            )


def _ways(
    call: Callable[..., Any], flat: Sequence[Any], argnums: Sequence[int], batch: Sequence[Tensor]
) -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    """Yield the transforms that take several grad_outputs at once, each with the gradients that it gives."""

    def graph() -> tuple[list[Tensor], list[Tensor]]:
        leaves, results = record_copies(call, flat, argnums)
        return [each for each in results if has_gradient(each)], [leaves[at] for at in argnums]

    def batched() -> list[Tensor]:
        results, inputs = graph()
        return _without_none(differentiate(results, inputs, batch, is_grads_batched=True), inputs)

    def mapped() -> list[Tensor]:
        results, inputs = graph()
        used: list[bool] = []

        def one(*grads: Tensor) -> tuple[Tensor, ...]:
            found = list(torch.autograd.grad(results, inputs, grads, allow_unused=True))
            used[:] = [bool(tensors_in([each])) for each in found]
            return tuple(tensors_in(found))

        found = iter(torch.func.vmap(one)(*batch))
        return _without_none([next(found) if each else None for each in used], inputs)

    yield "with `vmap` over a backward", mapped
    yield "with `is_grads_batched=True`", batched


def _without_none(found: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor]:
    return [
        torch.zeros(SIZE, *each.shape, dtype=each.dtype, device=each.device) if gradient is None else gradient
        for gradient, each in zip(found, inputs, strict=True)
    ]


BATCHED_GRADIENTS = Property(
    NAME,
    "several grad_outputs at once give what each gives alone",
    partial(covered_samples, NAME, _sample, "there is nothing to differentiate"),
    transforms=True,
    given=of_tools,
    reruns=True,
)


@dataclass(frozen=True)
class BatchedDifferentiation:
    """Some examples with grad_outputs, to be differentiated.

    Args:
        subject: The subject of the check.
        sample: The sample.
        argnums: The arguments to differentiate by.
        rows: The flat arguments of each example.
        dims: For each argument that has a batch, its dimension.
    """

    subject: Subject
    sample: Sample
    argnums: Sequence[int]
    rows: Sequence[list[Any]]
    dims: Mapping[int, int]

    @cached_property
    def with_grads(self) -> list[list[Any]]:
        """The flat arguments of each example, and behind them a gradient for each result."""
        generator = self.subject.generator()
        answers = []
        for row in self.rows:
            results = self.subject.call(self.sample, replicas(row))
            open_ = results_with_gradient(self.subject, self.sample, results)
            answers.append([*row, *random_grad_outputs(results, open_, generator)])
        return answers

    @property
    def count(self) -> int:
        """Number of flat arguments, before the gradients."""
        return len(self.sample.flat)

    @cached_property
    def every_dim(self) -> dict[int, int]:
        """The dimensions of all batches, those of grad_outputs too."""
        grads = enumerate(self.with_grads[0][self.count :], self.count)
        return {**self.dims, **{argnum: 0 for argnum, grad in grads if grad is not None}}

    @cached_property
    def batch(self) -> list[Any]:
        """The flat arguments of the whole batch, and the grad_outputs."""
        return batched(self.with_grads, self.every_dim)

    def one(self, function: Callable[..., Any]) -> OneByOne:
        """The gradients of one example, from its flat arguments and grad_outputs."""
        return partial(gradients_of, function, self.argnums, self.count)

    def by_examples(self) -> list[Tensor | None]:
        """The gradients of every example: `vmap` over `torch.func.vjp`."""
        return map_over(self._pulled, replicas(self.batch), self.every_dim)

    def _pulled(self, flat: list[Any]) -> list[Tensor]:
        pull = torch.func.vjp(
            partial(self._differentiable_results, flat), *(flat[argnum] for argnum in self.argnums)
        )[1]
        return list(pull(tuple(grad for grad in flat[self.count :] if grad is not None)))

    def _differentiable_results(self, flat: Sequence[Any], *given: Tensor) -> tuple[Tensor, ...]:
        """The results that a gradient can come in for, as a function of some arguments."""
        values = list(flat[: self.count])
        for argnum, value in zip(self.argnums, given, strict=True):
            values[argnum] = value.clone()  # it may write into it
        results = self.subject.call(self.sample, values)
        pairs = zip(results, flat[self.count :], strict=True)
        return tuple(result for result, grad in pairs if grad is not None)

    def through(self) -> list[Tensor | None]:
        """The gradients of the whole batch, by a backward through `vmap`; the batch comes first."""

        def mapped(flat: Sequence[Any]) -> list[Any]:
            return map_over(partial(self.subject.call, self.sample), flat, self.dims)

        found = gradients_of(mapped, self.argnums, self.count, replicas(self.batch))
        return [
            gradient.movedim(self.dims[argnum], 0) if argnum in self.dims else gradient
            for argnum, gradient in zip(self.argnums, found, strict=True)
        ]

    @cached_property
    def summed(self) -> frozenset[int]:
        """Positions of the gradients of a whole batch that are sums over its examples."""
        return frozenset(at for at, argnum in enumerate(self.argnums) if argnum not in self.dims)


def gradients_of(
    function: Callable[..., Any], argnums: Sequence[int], count: int, values: Sequence[Any]
) -> list[Tensor]:
    """The gradients by some arguments, zeros where autograd has none.

    Args:
        function: Takes flat arguments.
        argnums: The arguments to differentiate by.
        count: Number of flat arguments.
        values: Flat arguments, and behind them a gradient for each result.
    """
    return vjp_or_zeros(function, values[:count], argnums, values[count:])
