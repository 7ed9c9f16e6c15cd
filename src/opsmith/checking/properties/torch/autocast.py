"""Autocast: results have the dtypes that are promised, and forward and backward fit together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import differentiated, rule_location
from opsmith.checking.causes import UNKNOWN
from opsmith.checking.numerics.autodiff import differentiate, has_gradient, vjp
from opsmith.checking.promises import of_tools
from opsmith.checking.properties.torch.forms import (
    Examples,
    Fault,
    Form,
    Raised,
    attempt,
    form_fault,
    gradients_by,
    results_of,
)
from opsmith.checking.property import Coverage, Findings, Property, covered_samples, first_line, of_exception
from opsmith.checking.report import Failure
from opsmith.checking.run import TensorName, record_copies
from opsmith.checking.samples.cases import dtype_name
from opsmith.checking.samples.grad_outputs import random_grad_outputs
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.judging.compare import exact_difference
from opsmith.judging.tensors import replica

NAME = "autocast"
DTYPES = (torch.bfloat16, torch.float16)

WIDE = torch.float32
"""dtype of the inputs: autocast leaves float64 alone."""


@dataclass(frozen=True)
class Casting:
    """A sample in float32 on a device, to be run under autocast, which lowers to a dtype."""

    subject: Subject
    sample: Sample
    device: torch.device
    dtype: torch.dtype
    coverage: Coverage

    def __str__(self) -> str:
        return f"{self.sample} under autocast to {dtype_name(self.dtype)} on {self.device.type}"

    def flat(self) -> list[Any]:
        """The arguments in float32."""
        return self.sample.at(WIDE, self.device)

    def call(self, flat: Sequence[Any]) -> list[Any]:
        """The results, as users get them."""
        return self.subject.call(self.sample, flat)

    def region(self) -> torch.autocast:
        """The region under autocast."""
        return torch.autocast(self.device.type, dtype=self.dtype)

    @property
    def promised(self) -> bool:
        """True if dtypes of results are promised: a declared operator casts its arguments by its rule.

        An adopted class behaves as the class does, which promises nothing.
        """
        return self.subject.specification.origin.kind == "declared"

    def cast(self, flat: Sequence[Any]) -> list[Any]:
        """The arguments as the operator's rule for autocast casts them."""
        dtype = self.dtype if self.subject.specification.autocast == "lower" else WIDE
        return [
            value.to(dtype)
            if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
            else value
            for value in flat
        ]

    def held_to(self, right: Examples, words: str, outputs: Sequence[TensorName]) -> Form:
        """Outputs, held to right ones and to the digits of autocast's dtype."""

        def fault(position: int, got: Any) -> Fault | None:
            if not isinstance(got, Tensor) or not got.is_floating_point():
                return None
            found = attempt(partial(right.difference, position, got))
            if isinstance(found, Raised):
                reason = first_line(found.error)
                self.refuse(
                    f"the numbers under autocast were left out, for it does not run in float64: {reason}"
                )
                return None
            return None if found is None else Fault("value", difference=found)

        than = f"is further off than rounding to {dtype_name(self.dtype)} explains"
        return Form(NAME, words, than, outputs, fault, {"sample": str(self)})

    def refuse(self, reason: str) -> None:
        """Note a part that was not checked."""
        self.coverage.refused[reason] = None


def autocast_state(kind: str) -> tuple[bool, torch.dtype, bool]:
    """Autocast's own state for a type of device: on or off, its dtype, whether it caches."""
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return enabled, dtype, torch.is_autocast_cache_enabled()


def _sample(subject: Subject, sample: Sample, coverage: Coverage) -> Findings:
    """Run every sample in float32 under autocast, and its backward outside."""
    if not sample.inexact or subject.rank(sample) >= subject.effort.samples:
        return
    for device in subject.devices:
        for dtype in DTYPES if subject.effort.exhaustive else DTYPES[:1]:
            casting = Casting(subject, sample, device, dtype, coverage)
            plain = attempt(partial(casting.call, casting.flat()))
            if isinstance(plain, Raised):
                casting.refuse(f"it does not run in float32: {first_line(plain.error)}")
                continue
            yield from _cast(casting)
            if not subject.rank(sample) and coverage.ran and dtype == DTYPES[0]:
                yield from _mixed(casting)


def _cast(casting: Casting) -> Findings:
    """One forward under autocast, and its backward outside of it."""
    kind, argnums = casting.device.type, differentiated(casting.subject, casting.sample).argnums
    outside = autocast_state(kind)

    def under() -> tuple[list[Any], Any, list[Failure]]:
        with casting.region():
            inside = autocast_state(kind)
            leaves, results = record_copies(casting.call, casting.flat(), argnums)
            return leaves, results, [*_restored(casting, inside, "a call")]

    found = attempt(under)
    if isinstance(found, Raised):
        casting.refuse(f"under autocast it raises {found}")
    else:
        leaves, results, leaked = found
        casting.coverage.ran += 1
        yield from leaked
        wrong = [*_results(casting, results)]
        yield from wrong
        if not wrong:
            yield from _backward(casting, [leaves[argnum] for argnum in argnums], results, argnums)
    yield from _restored(casting, outside, "a call and its backward")


def _results(casting: Casting, results: Sequence[Any]) -> Findings:
    """Hold the results to the dtypes that are promised, and to the rounding of autocast's dtype."""
    subject, sample = casting.subject, casting.sample
    # What the promised call raises is reported for the call under autocast.
    promised = attempt(lambda: casting.call(casting.cast(casting.flat()))) if casting.promised else None
    outputs, left = results_of(subject, sample, subject.specification.where), [*results]
    if promised is not None and not isinstance(promised, Raised):
        for position, (output, got, right) in enumerate(zip(outputs, results, promised, strict=True)):
            fault = None if got is None else form_fault(got, right)
            if fault is not None:
                words = f"under autocast {output} has the {fault.aspect} {fault.got}, and autocast="
                message = f"{words}{subject.specification.autocast!r} promises {fault.expected}"
                cause = fault.aspect if fault.aspect in ("shape", "dtype") else "dtype"
                evidence = {"sample": str(casting), **fault.evidence()}
                yield Failure(NAME, output.name, cause, message, output.where, evidence)
            if got is None or fault is not None or exact_difference(got, right) is None:
                left[position] = None
    if subject.has_truth:
        function = casting.call if subject.apply is not None else subject.plain(sample)
        right = Examples(subject, sample, [casting.flat()], dtype=casting.dtype, functions=[function])
        yield from casting.held_to(right, "under autocast ", outputs).failures(left, set())


_DTYPE = r"dtype|scalar type|BFloat16|Half|data type"
"""Words in torch's errors about dtypes that do not fit."""


def _backward(
    casting: Casting, inputs: Sequence[Tensor], results: Sequence[Any], argnums: Sequence[int]
) -> Findings:
    """Run the backward outside of autocast, and hold the gradients to the rounding of autocast's dtype."""
    subject, sample = casting.subject, casting.sample
    drawn = random_grad_outputs(results, [*map(has_gradient, results)], subject.generator())
    # Their numbers are exact in autocast's dtype.
    grads = [g if g is None or g.is_complex() else g.to(casting.dtype).to(g.dtype) for g in drawn]
    plain = [None if grad is None else replica(grad, WIDE) for grad in grads]
    if not argnums or all(grad is None for grad in grads):
        return
    if isinstance(attempt(partial(vjp, casting.call, casting.flat(), argnums, plain)), Raised):
        return  # it is wrong without autocast too, which `gradient` reports
    found = attempt(partial(differentiate, results, inputs, grads))
    if isinstance(found, Raised):
        yield from _backward_raised(casting, argnums, found)
    elif subject.has_truth:
        rows = [[*casting.flat(), *plain]]
        right = Examples(subject, sample, rows, (), argnums, casting.dtype, functions=[casting.call])
        words, outputs = "after a forward under autocast, ", gradients_by(subject, sample, argnums)
        full = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, found, strict=True)]
        for failure in casting.held_to(right, words, outputs).failures(full, set()):
            yield replace(failure, cause=UNKNOWN)


def _backward_raised(casting: Casting, argnums: Sequence[int], found: Raised) -> Findings:
    """Report a backward that raises after a forward under autocast alone, where that is claimed to work."""
    subject, sample, error = casting.subject, casting.sample, found.error
    message = (
        f"after a forward under autocast to {dtype_name(casting.dtype)}, the backward raises {found}; in "
        "float32 it does not. "
    )
    if isinstance(error, NotImplementedError):
        casting.refuse(first_line(error))
    elif not casting.promised and subject.specification.origin.own("autocast") is None:
        casting.refuse(f"{message}`torch.amp.custom_fwd` and `custom_bwd` over both make them fit")
    else:
        labels = ", ".join(sample.labels[argnum] for argnum in argnums)
        cause = "dtype" if re.search(_DTYPE, str(error)) else "raises"
        message += "The dtypes that the forward saves and that come in are not the same there"
        where = rule_location(subject, sample.names[argnums[0]])
        yield Failure(NAME, labels, cause, message, where, of_exception(error, str(casting)))


def _mixed(casting: Casting) -> Findings:
    """Arguments of several dtypes, as layers under autocast hand them on."""
    subject, sample = casting.subject, casting.sample
    if len(sample.inexact) < 2 or any(sample.flat[argnum].is_complex() for argnum in sample.inexact):
        return
    for argnum in sample.inexact:
        flat = casting.flat()
        flat[argnum] = replica(flat[argnum], casting.dtype)

        def under(flat: list[Any] = flat) -> list[Any]:
            with torch.no_grad(), casting.region():
                return casting.call(flat)

        found, label = attempt(under), sample.labels[argnum]
        if not isinstance(found, Raised):
            continue
        message = f"under autocast, with `{label}` alone in {dtype_name(casting.dtype)}, it raises {found}"
        if casting.promised and not isinstance(found.error, NotImplementedError):
            evidence = of_exception(found.error, str(casting))
            yield Failure(NAME, label, "raises", message, subject.specification.where, evidence)
        else:
            casting.refuse(message)


def _restored(casting: Casting, before: tuple[bool, torch.dtype, bool], what: str) -> Iterator[Failure]:
    """Report a call that leaves autocast in another state, and restore that."""
    kind = casting.device.type
    after = autocast_state(kind)
    if after == before:
        return
    message = (
        f"{what} under autocast leaves autocast in another state: on, dtype and cache were {before}, and are "
        f"{after}"
    )
    location = casting.subject.specification.where
    yield Failure(NAME, None, "side-effect", message, location, {"sample": str(casting)})
    torch.set_autocast_enabled(kind, before[0])
    torch.set_autocast_dtype(kind, before[1])
    torch.set_autocast_cache_enabled(before[2])


AUTOCAST = Property(
    NAME,
    "under autocast, dtypes are as promised, and forward and backward fit",
    partial(covered_samples, NAME, _sample, "no sample has a floating tensor, which autocast casts"),
    inputs="few",
    traits=("integration", "transforms"),
    given=of_tools,
)
