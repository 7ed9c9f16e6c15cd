"""Several incoming gradients at once give what each gives alone: a backward under `vmap`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.derivative import with_gradient
from opsmith.checking.differentiated import differentiated, rule_place
from opsmith.checking.examples import own_dtype, working_dtype
from opsmith.checking.followed import called
from opsmith.checking.layouts import incoming
from opsmith.checking.loop import Loop
from opsmith.checking.mapped_gradients import gradients_of
from opsmith.checking.mapping import SIZE
from opsmith.checking.mistakes import refuse_own
from opsmith.checking.property import (
    Findings,
    Note,
    Property,
    Skipped,
    each_sample,
    first_line,
)
from opsmith.checking.quiet import quiet
from opsmith.checking.report import Failure
from opsmith.checking.sample import Sample, is_inexact
from opsmith.checking.subject import Subject
from opsmith.core.calls import tensors_in

NAME = "batched_gradients"


def run(subject: Subject) -> Findings:
    """Differentiate every sample with a batch of incoming gradients, and with each of them alone."""
    compared: list[str] = []
    refused: dict[str, None] = {}
    failed = False

    def look(subject: Subject, sample: Sample) -> Findings:
        if subject.effort.name == "quick" and sample.position:
            return
        yield from _sample(subject, sample, compared, refused)

    for finding in each_sample(NAME, subject, look):
        failed = failed or isinstance(finding, Failure)
        yield finding
    if compared or failed:
        yield from (Note(reason) for reason in refused)
    else:
        yield Skipped("; ".join(refused) or "there is nothing to differentiate")


def _sample(subject: Subject, sample: Sample, compared: list[str], refused: dict[str, None]) -> Findings:
    places = differentiated(subject, sample).places
    if not places:
        return
    dtype = working_dtype(subject, sample)
    flat = sample.at(dtype)
    call = partial(subject.call, sample)
    results = called(call, flat, places)[1]
    open_ = [is_inexact(each) and each.requires_grad for each in results]
    generator = subject.generator()
    grads = [
        [incoming(each, generator) if o else None for each, o in zip(results, open_, strict=True)]
        for _ in range(SIZE)
    ]
    if not any(open_):
        return
    count = len(flat)
    rows = [[*flat, *each] for each in grads]
    differing = [count + at for at, o in enumerate(open_) if o]
    loop = Loop(
        partial(gradients_of, call, places, count),
        rows,
        differing,
        generator,
        subject.has_truth,
        dtype or own_dtype(sample),
    )
    batch = [torch.stack(tensors_in([row[at] for row in grads])) for at, o in enumerate(open_) if o]
    wrong: set[str] = set()
    for words, together in _ways(call, flat, places, batch):
        try:
            with quiet():
                found = together()
        except Exception as error:
            refuse_own(error)
            refused[f"{words} is refused: {type(error).__name__}: {first_line(error)}"] = None
            return  # what `vmap` refuses, as `grad.data`, can kill the process by `is_grads_batched`
        compared.append(words)
        for position, (place, got) in enumerate(zip(places, found, strict=True)):
            label = sample.labels[place]
            fault = loop.fault(position, got)
            if fault is None or label in wrong:
                continue
            wrong.add(label)
            yield Failure(
                NAME,
                label,
                fault.cause,
                f"{words}, the gradient of `{label}` is not what each incoming gradient gives alone: {fault}",
                rule_place(subject, sample.names[place]),
                {"sample": str(sample), "incoming gradients": SIZE, **fault.evidence()},
            )


def _ways(
    call: Callable[..., Any], flat: Sequence[Any], places: Sequence[int], batch: Sequence[Tensor]
) -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    """What takes several incoming gradients at once: its words, and the gradients that it gives."""

    def graph() -> tuple[list[Tensor], list[Tensor]]:
        leaves, results = called(call, flat, places)
        return [each for each in results if with_gradient(each)], [leaves[at] for at in places]

    def batched() -> list[Tensor]:
        results, inputs = graph()
        found: Sequence[Tensor | None] = torch.autograd.grad(
            results, inputs, [*batch], allow_unused=True, is_grads_batched=True
        )
        return _without_none(found, inputs)

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


BATCHED_GRADIENTS = Property(NAME, "several incoming gradients at once give what each gives alone", run)
