"""Declared `batching=`: one call for a batch gives the same results as a call for each example."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from opsmith.checking.properties.torch.vmap import SIZE, map_over
from opsmith.checking.property import Findings, Note, Property, Skipped
from opsmith.checking.run import Run, TensorName, each_run
from opsmith.checking.samples.batches import batch_of, batched
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.checking.ways import Examples, compare_outputs
from opsmith.core.call_arguments import tensors_in
from opsmith.core.shapes import ELEMENTWISE, leads
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.vmap import batched_call

NAME = "batching"


def run(subject: Subject) -> Findings:
    """Compute a batch made of every sample by one call, and each of its examples alone."""
    if subject.specification.batching is None:
        yield Skipped("it declares no `batching=`")
    elif subject.draws:
        yield Skipped("it draws random numbers, which one call draws in another order than many")
    else:
        yield from each_run(NAME, _batches, subject)


def _batches(run: Run) -> Findings:
    run, subject, sample = replace(run, dtype=torch.float64), run.subject, run.sample
    specification, wrong = subject.specification, set[str | None]()
    names = [TensorName(each.name, "result", specification.where) for each in subject.every(sample)]
    for argnums in _batched(specification, sample):
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
            # Each place stands for itself in any dimension, also in a new last one.
            last = subject.reference(sample, batched(rows, dict.fromkeys(argnums, -1)))
            found.append([each.movedim(-1, 0) for each in last])
        if specification.opaque and not capabilities.on("torch_func"):
            yield Note("`vmap` was left out: of an opaque operator it needs the capability `torch_func`")
        else:
            mapped = map_over(partial(subject.call, sample), batch, over)
            visible = dict(zip(subject.visible_positions(sample), mapped, strict=True))
            found.append([visible.get(at, each) for at, each in enumerate(right.expected)])
        labels = ", ".join(f"`{sample.labels[argnum]}`" for argnum in argnums)
        form = (
            f"batching={specification.batching!r} is not so: in a batch of {labels}, {{}} is not what each "
        )
        for outputs in found:
            yield from compare_outputs(run, f"{form}example gives alone", names, outputs, right.fault, wrong)


def _batched(specification: Specification, sample: Sample) -> Iterator[tuple[int, ...]]:
    """Yield the arguments to batch: all that can be, together and each alone."""
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


BATCHING = Property(NAME, "one call for a batch gives what each example gives alone", run)
