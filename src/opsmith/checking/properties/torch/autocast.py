"""Autocast: results have the promised dtypes, and the dtypes of forward and backward agree."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.causes import UNKNOWN
from opsmith.checking.exceptions import Raised, attempt, first_line
from opsmith.checking.numerics.autodiff import differentiate, has_gradient, vjp
from opsmith.checking.promises import of_tools
from opsmith.checking.property import Findings, Property, of_exception
from opsmith.checking.report import Failure
from opsmith.checking.run import Coverage, LiveCall, Run, TensorName, covered_runs
from opsmith.checking.samples.cases import dtype_name
from opsmith.checking.samples.grad_outputs import random_grad_outputs
from opsmith.checking.ways import CAUSES_OF_ASPECTS, Examples, compare_outputs
from opsmith.judging.compare import Difference, exact_difference, form_difference
from opsmith.judging.tensors import replica

NAME = "autocast"
DTYPES = (torch.bfloat16, torch.float16)

WIDE = torch.float32
"""dtype of the inputs, since autocast does not change float64."""


@dataclass(frozen=True)
class Casting(Run):
    """A run in float32 under autocast, which casts to a lower dtype.

    Args:
        lower: The lower dtype.
        coverage: Progress of the property.
    """

    lower: torch.dtype = DTYPES[0]
    coverage: Coverage = field(default_factory=Coverage)

    def region(self) -> torch.autocast:
        """The region under autocast."""
        return torch.autocast(self.device.type, dtype=self.lower)

    @property
    def promised(self) -> bool:
        """True if dtypes of results are promised, as by a declared operator, which casts its arguments.

        An adopted operator behaves like its class, which promises no dtypes.
        """
        return self.subject.specification.origin.kind == "declared"

    def cast(self, flat: Sequence[Any]) -> list[Any]:
        """The arguments, cast by the operator's rule for autocast."""
        dtype = self.lower if self.subject.specification.autocast == "lower" else WIDE
        return [
            value.to(dtype)
            if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
            else value
            for value in flat
        ]

    def compare(
        self, words: str, outputs: Sequence[TensorName], found: Sequence[Any], right: Examples
    ) -> Iterator[Failure]:
        """Compare outputs with the right outputs, to the precision of autocast's dtype."""

        def fault(position: int, got: Any) -> Difference | None:
            if not isinstance(got, Tensor) or not got.is_floating_point():
                return None
            difference = attempt(partial(right.difference, position, got))
            if not isinstance(difference, Raised):
                return difference
            left = "the numbers under autocast were left out, because the operator does not run in float64"
            self.refuse(f"{left}: {first_line(difference.error)}")
            return None

        form = f"{words} {{}} differs by more than the rounding to {dtype_name(self.lower)}"
        yield from compare_outputs(self, form, outputs, found, fault, set())

    def refuse(self, reason: str) -> None:
        """Note a part that was not checked."""
        self.coverage.refused[reason] = None


def autocast_state(kind: str) -> tuple[bool, torch.dtype, bool]:
    """Autocast's state for a type of device: enabled or not, its dtype, and if its cache is enabled."""
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return enabled, dtype, torch.is_autocast_cache_enabled()


def _casts(run: Run, coverage: Coverage) -> Findings:
    """Run every sample in float32 under autocast, and its backward outside of autocast."""
    subject, sample = run.subject, run.sample
    if not sample.inexact or subject.rank(sample) >= subject.effort.samples:
        return
    for device in subject.devices:
        for lower in DTYPES if subject.effort.exhaustive else DTYPES[:1]:
            words = f"{sample} under autocast to {dtype_name(lower)} on {device.type}"
            casting = Casting(
                subject, sample, NAME, device, WIDE, words=words, lower=lower, coverage=coverage
            )
            plain = attempt(partial(subject.call, sample, casting.flat()))
            if isinstance(plain, Raised):
                casting.refuse(f"the operator does not run in float32: {first_line(plain.error)}")
                continue
            yield from _cast(casting)
            if not subject.rank(sample) and coverage.ran and lower == DTYPES[0]:
                yield from _mixed(casting)


def _cast(casting: Casting) -> Findings:
    """One forward under autocast, and its backward outside of it."""
    outside = autocast_state(casting.device.type)

    def under() -> tuple[LiveCall, list[Failure]]:
        with casting.region():
            inside = autocast_state(casting.device.type)
            return casting.call(), [*_restored(casting, inside, "a call")]

    found = attempt(under)
    if isinstance(found, Raised):
        casting.refuse(f"under autocast, the operator raises {found}")
    else:
        call, leaked = found
        casting.coverage.ran += 1
        yield from leaked
        wrong = [*_results(casting, call.results)]
        yield from wrong
        if not wrong:
            yield from _backward(casting, call)
    yield from _restored(casting, outside, "a call and its backward")


def _results(casting: Casting, results: Sequence[Any]) -> Findings:
    """Compare the results with the promised dtypes, and with the right numbers to the lower precision."""
    subject, call, left = casting.subject, partial(casting.subject.call, casting.sample), [*results]
    # An exception of the promised call is reported for the call under autocast.
    promised = attempt(lambda: call(casting.cast(casting.flat()))) if casting.promised else None
    outputs = casting.names(subject.specification.where)[: len(results)]
    if promised is not None and not isinstance(promised, Raised):
        for position, (output, got, right) in enumerate(zip(outputs, results, promised, strict=True)):
            fault = None if got is None else form_difference(got, right)
            if fault is not None:
                words = f"under autocast {output} has the {fault.aspect} {fault.got}, and autocast="
                message = f"{words}{subject.specification.autocast!r} promises {fault.expected}"
                cause = CAUSES_OF_ASPECTS.get(fault.aspect, "dtype")
                yield casting.failure(output.name, cause, message, output.where, fault.evidence())
            if got is None or fault is not None or exact_difference(got, right) is None:
                left[position] = None
    if subject.has_truth:
        function = call if subject.apply is not None else subject.plain(casting.sample)
        right = Examples(casting, [casting.flat()], dtype=casting.lower, functions=[function])
        yield from casting.compare("under autocast", outputs, left, right)


_DTYPE = r"dtype|scalar type|BFloat16|Half|data type"
"""Words in torch's errors about dtypes that do not match."""


def _backward(casting: Casting, under: LiveCall) -> Findings:
    """Run the backward outside of autocast, and compare gradients to the precision of autocast's dtype."""
    subject, call = casting.subject, partial(casting.subject.call, casting.sample)
    drawn = random_grad_outputs(under.results, [*map(has_gradient, under.results)], subject.generator())
    # These numbers are exact in autocast's dtype.
    grads = [g if g is None or g.is_complex() else g.to(casting.lower).to(g.dtype) for g in drawn]
    plain = [None if grad is None else replica(grad, WIDE) for grad in grads]
    if not casting.argnums or all(grad is None for grad in grads):
        return
    if isinstance(attempt(partial(vjp, call, casting.flat(), casting.argnums, plain)), Raised):
        return  # it is wrong without autocast too, which `gradient` reports
    found = attempt(partial(differentiate, under.results, under.inputs, grads))
    if isinstance(found, Raised):
        yield from _backward_raised(casting, found)
    elif subject.has_truth:
        rows = [[*casting.flat(), *plain]]
        right = Examples(casting, rows, gradients=True, dtype=casting.lower, functions=[call])
        pairs = zip(under.inputs, found, strict=True)
        full = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in pairs]
        outputs = casting.names()[len(grads) :]
        for failure in casting.compare("after a forward under autocast,", outputs, full, right):
            yield replace(failure, cause=UNKNOWN)


def _backward_raised(casting: Casting, found: Raised) -> Findings:
    """Report a backward that raises only after a forward under autocast, if this is claimed to work."""
    message = (
        f"after a forward under autocast to {dtype_name(casting.lower)}, the backward raises {found}; in "
        "float32 it does not. "
    )
    if isinstance(found.error, NotImplementedError):
        casting.refuse(first_line(found.error))
    elif not casting.promised and casting.subject.specification.origin.own("autocast") is None:
        casting.refuse(
            f"{message}`torch.amp.custom_fwd` over the forward and `custom_bwd` over the backward make "
            "the dtypes equal"
        )
    else:
        labels = ", ".join(casting.sample.labels[argnum] for argnum in casting.argnums)
        cause = "dtype" if re.search(_DTYPE, str(found.error)) else "raises"
        message += "Under autocast, the dtypes of saved tensors and of grad_outputs differ"
        evidence = of_exception(found.error, str(casting))
        yield casting.failure(labels, cause, message, casting.backward_location(), evidence)


def _mixed(casting: Casting) -> Findings:
    """Check arguments of mixed dtypes, as layers under autocast pass them on."""
    sample = casting.sample
    if len(sample.inexact) < 2 or any(sample.flat[argnum].is_complex() for argnum in sample.inexact):
        return
    for argnum in sample.inexact:
        flat = casting.flat()
        flat[argnum] = replica(flat[argnum], casting.lower)

        def under(flat: list[Any] = flat) -> list[Any]:
            with torch.no_grad(), casting.region():
                return casting.subject.call(sample, flat)

        found, label = attempt(under), sample.labels[argnum]
        if not isinstance(found, Raised):
            continue
        message = (
            f"under autocast, with only `{label}` in {dtype_name(casting.lower)}, the operator raises {found}"
        )
        if casting.promised and not isinstance(found.error, NotImplementedError):
            evidence = of_exception(found.error, str(casting))
            yield casting.failure(label, "raises", message, evidence=evidence)
        else:
            casting.refuse(message)


def _restored(casting: Casting, before: tuple[bool, torch.dtype, bool], what: str) -> Iterator[Failure]:
    """Report a call that changes autocast's state, and restore the state."""
    kind = casting.device.type
    after = autocast_state(kind)
    if after == before:
        return
    message = (
        f"{what} under autocast changes the state of autocast: enabled, dtype and cache were "
        f"{before}, and are now {after}"
    )
    yield casting.failure(None, "side-effect", message)
    torch.set_autocast_enabled(kind, before[0])
    torch.set_autocast_dtype(kind, before[1])
    torch.set_autocast_cache_enabled(before[2])


AUTOCAST = Property(
    NAME,
    "under autocast, results have the promised dtypes, and the backward runs",
    partial(covered_runs, NAME, _casts, "no sample has a floating tensor, which autocast casts"),
    inputs="few",
    traits=("integration", "transforms"),
    given=of_tools,
)
