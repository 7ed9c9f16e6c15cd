"""Declared `batching=`: one call for a batch gives the same results as a call for each example."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.causes import CAUSES
from opsmith.checking.numerics.compare import (
    Difference,
    exact_difference,
    gradcheck_difference,
    metadata_difference,
)
from opsmith.checking.properties.torch.mapping import map_over
from opsmith.checking.property import Findings, Note, Property, Skipped, each_sample
from opsmith.checking.report import Failure
from opsmith.checking.samples.batches import drawn
from opsmith.checking.samples.sample import Sample, is_inexact
from opsmith.checking.subject import Subject
from opsmith.core.call_arguments import tensors_in
from opsmith.core.shapes import ELEMENTWISE, leads
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.vmap import batched_call

NAME = "batching"
SIZE = 3


def run(subject: Subject) -> Findings:
    """Compute a batch made of every sample by one call, and each of its examples alone."""
    if subject.specification.batching is None:
        yield Skipped("it declares no `batching=`")
    elif subject.draws:
        yield Skipped("it draws random numbers, which one call draws in another order than many")
    else:
        yield from each_sample(NAME, _sample, subject)


def _sample(subject: Subject, sample: Sample) -> Findings:
    generator = subject.generator()
    for argnums in _batched(subject.specification, sample):
        flat = sample.in_double()
        columns = {argnum: drawn(flat[argnum], SIZE, generator) for argnum in argnums}
        rows = [[columns[p][i] if p in columns else v for p, v in enumerate(flat)] for i in range(SIZE)]
        batch = [torch.stack(columns[p]) if p in columns else v for p, v in enumerate(flat)]
        dims = [0 if argnum in columns else None for argnum in range(len(batch))]
        alone = zip(*(subject.reference(sample, row) for row in rows), strict=True)
        expected = [None if column[0] is None else torch.stack(column) for column in alone]
        whole = batched_call(subject.specification, sample.flattening, batch, dims, SIZE, "error")
        if whole is not None:
            names = [each.name for each in subject.every(sample)]
            found = whole.restore(subject.reference(sample, whole.flat), names)
            yield from _compare(subject, sample, argnums, found, expected, range(len(expected)))
        if subject.specification.batching == ELEMENTWISE and len(argnums) == len(tensors_in([*flat])):
            # Each place stands for itself in any dimension, also in a new last one.
            last = [torch.stack(columns[p], -1) if p in columns else v for p, v in enumerate(flat)]
            beside = [None if each is None else each.movedim(0, -1) for each in expected]
            found = tuple(subject.reference(sample, last))
            yield from _compare(subject, sample, argnums, found, beside, range(len(expected)))
        if subject.specification.opaque and not capabilities.on("torch_func"):
            yield Note("`vmap` was left out: of an opaque operator it needs the capability `torch_func`")
            continue
        visible = subject.visible_positions(sample)
        over = dict.fromkeys(columns, 0)
        mapped = [each for each in map_over(partial(subject.call, sample), batch, over) if each is not None]
        present = [position for position in visible if expected[position] is not None]
        yield from _compare(subject, sample, argnums, mapped, [expected[p] for p in present], present)


def _batched(specification: Specification, sample: Sample) -> Iterator[tuple[int, ...]]:
    """Yield the arguments to batch: all that can be, together and each alone."""
    batching, shapes = specification.batching, specification.shapes
    argnums = tuple(
        argnum
        for argnum, (name, value) in enumerate(zip(sample.names, sample.flat, strict=True))
        if isinstance(value, Tensor)
        and (
            batching == ELEMENTWISE
            or (shapes is not None and batching is not None and leads(batching, shapes, name))
        )
    )
    yield argnums
    if len(argnums) > 1:
        yield from ((argnum,) for argnum in argnums)


def _compare(
    subject: Subject,
    sample: Sample,
    argnums: Sequence[int],
    found: Sequence[Tensor | None],
    expected: Sequence[Tensor | None],
    positions: Sequence[int],
) -> Findings:
    batched = ", ".join(f"`{sample.labels[argnum]}`" for argnum in argnums)
    claim = f"batching={subject.specification.batching!r}"
    for got, right, position in zip(found, expected, positions, strict=True):
        if got is None or right is None:
            continue
        name = subject.every(sample)[position].name
        failed = partial(Failure, NAME, name, where=subject.specification.where)
        evidence: dict[str, Any] = {"sample": f"{sample} in float64", "batched": batched}
        fault = metadata_difference(got, right, strides=False)
        if fault is not None:
            aspect, actual, wanted = fault
            message = (
                f"with {claim}, one call for a batch of {batched} returns `{name}` with the {aspect} "
                f"{actual}, and calls for each example with {wanted}"
            )
            yield failed(
                cause=aspect if aspect in CAUSES else "kernel-mismatch",
                message=message,
                evidence={**evidence, "got": actual, "expected": wanted},
            )
            continue
        difference = _difference(got, right)
        if difference is not None:
            message = (
                f"{claim} is not so: in a batch of {batched}, `{name}` is not what each example gives alone: "
                f"{difference}"
            )
            yield failed(
                cause="kernel-mismatch", message=message, evidence={**evidence, **difference.evidence()}
            )


def _difference(got: Tensor, right: Tensor) -> Difference | None:
    return gradcheck_difference(got, right) if is_inexact(right) else exact_difference(got, right)


BATCHING = Property(NAME, "one call for a batch gives what each example gives alone", run)
