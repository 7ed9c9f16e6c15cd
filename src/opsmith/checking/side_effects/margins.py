"""Margins: memory before and after the tensors of a call, on which nothing that it gives may depend."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import Overlooking
from opsmith.checking.property import Findings
from opsmith.checking.run import Run, copies, differing
from opsmith.checking.samples.sample import Sample
from opsmith.checking.side_effects.canaries import GuardedTensor
from opsmith.checking.subject import Subject
from opsmith.core.call_arguments import tensors_in
from opsmith.judging.tensors import is_inexact

GRAD_OUTPUT, SAVED = "grad_output", "a saved tensor"
AGAIN = 3
"""Runs that must agree with each of two: an operator that differs from run to run may agree by chance."""


def with_margins(flat: Sequence[Any], labels: Sequence[str], other: Collection[str] = ()) -> list[Any]:
    """The arguments between margins; of some labels, these hold the other numbers.

    Example:
        >>> (x,) = with_margins([torch.tensor([1, 4])], ["x"], ["x"])
        >>> x.as_strided((4,), (1,))
        tensor([1, 4, 4, 4])
    """
    return [_with_margins(value, label in other) for value, label in zip(flat, labels, strict=True)]


def _with_margins(value: Any, other: bool) -> Any:
    if type(value) is not Tensor or value.layout != torch.strided:
        return value
    guard, item = GuardedTensor.of(value), value.element_size()
    number = torch.tensor([_number(value, other)], dtype=torch.float64).to(value.dtype)
    guard.buffer.view(-1, item)[~guard.owned[::item]] = number.view(torch.uint8).to(value.device)
    return guard.tensor


def _number(tensor: Tensor, other: bool) -> float:
    """One of two numbers beyond those of a tensor; of whole numbers, which may be indices, one like them."""
    numbers, inexact = tensor.detach().to(torch.complex128), is_inexact(tensor)
    numbers = numbers.abs() if inexact else numbers.real
    largest = float(numbers[numbers.isfinite()].amax()) if numbers.isfinite().any() else 0.0
    return (1 + largest) * (3 if other else -2) if inexact else other * max(largest, 1.0)


def read_outside(property: str, subject: Subject, sample: Sample) -> Findings:
    """Yield a failure where a call or its backward depends on memory outside of what it was given."""
    for run in Run.of(subject, sample, property):
        labels = [*sample.labels, *([GRAD_OUTPUT, SAVED] if run.argnums else [])]
        one, other = _values(run, ()), _values(run, labels)
        at = differing(one, other)
        again = [(one, ()), (other, labels)] * AGAIN if at else []
        # Runs that differ anyway show nothing.
        if not at or any(differing(each, _values(run, named)) for each, named in again):
            continue
        named = [label for label in labels if differing(one, _values(run, [label]))] or labels
        words = " or ".join(label if label == SAVED else f"`{label}`" for label in named)
        name, input = run.names()[at[0]], None if named[0] == SAVED else named[0]
        message = (
            f"{name} depends on memory outside of {words}: it changes with the numbers that lie before and "
            "after it. Compare each index with the sizes; `opsmith check --sanitize`, or "
            "`check(..., sanitize=True)`, names the line of a kernel in C++"
        )
        yield run.failure(input, "out-of-bounds", message, name.where)


def _values(run: Run, other: Collection[str]) -> Sequence[Tensor | None]:
    """The results and gradients of a call, or as many as there are before it raises."""
    run.subject.restore_outside()
    found: list[Tensor | None] = []
    flat = with_margins(run.flat(), run.sample.labels, other)
    memory = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(flat)}

    def pack(tensor: Tensor) -> Tensor:
        own = tensor.layout != torch.strided or tensor.untyped_storage().data_ptr() in memory
        return tensor.detach() if own else _with_margins(tensor.detach(), SAVED in other)

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved)
    with Overlooking(), torch.set_grad_enabled(bool(run.argnums)), hooks:  # what it raises is reported
        call = run.call(flat)
        found += copies(call.results)
        if run.argnums:
            found += copies(call.backward([_with_margins(g, GRAD_OUTPUT in other) for g in call.grads()]))
    return found
