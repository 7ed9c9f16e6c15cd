"""Batched gradients: several grad_outputs at once give what each gives alone, by a backward under `vmap`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from opsmith.checking.calls import differentiated, record_copies
from opsmith.checking.numerics.autodiff import differentiate, has_gradient
from opsmith.checking.promises import of_tools
from opsmith.checking.properties.torch.forms import Examples, Form, Raised, attempt, gradients_by
from opsmith.checking.properties.torch.mapping import SIZE, map_over
from opsmith.checking.property import Coverage, Findings, Property, covered_samples
from opsmith.checking.samples.batches import batched, working_dtype
from opsmith.checking.samples.grad_outputs import random_grad_outputs
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject

NAME = "batched_gradients"


def _sample(subject: Subject, sample: Sample, coverage: Coverage) -> Findings:
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
        form = Form(NAME, f"{words}, ", than, outputs, right.fault, evidence)
        yield from form.failures(found, coverage.wrong)


Transform = Callable[[list[Tensor], list[Tensor], list[Tensor]], Sequence[Tensor | None]]
"""Function from results, inputs and batches of grad_outputs to gradients."""


def _over_backward(
    results: list[Tensor], inputs: list[Tensor], grads: list[Tensor]
) -> Sequence[Tensor | None]:
    backward = partial(torch.autograd.grad, results, inputs, allow_unused=True)
    return map_over(backward, grads, dict.fromkeys(range(len(grads)), 0))


BATCHED_GRADIENTS = Property(
    NAME,
    "several grad_outputs at once give what each gives alone",
    partial(covered_samples, NAME, _sample, "there is nothing to differentiate"),
    transforms=True,
    given=of_tools,
    reruns=True,
)
