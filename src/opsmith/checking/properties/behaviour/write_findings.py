"""Findings of calls in place: faults, arguments that are never written, kernels that write and then raise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.checking.exceptions import refuse_own
from opsmith.checking.numerics.compare import Difference, SavedBits
from opsmith.checking.processes.fork import in_child
from opsmith.checking.properties.behaviour.write_runs import ReferenceWrite, in_place
from opsmith.checking.properties.kernels.sizes import authored, forms, refused_calls, watched_in_child
from opsmith.checking.property import Findings, Note, first_line
from opsmith.checking.report import Failure
from opsmith.checking.samples.batches import replicas
from opsmith.checking.samples.sample import Sample
from opsmith.checking.side_effects.global_settings import without_logs
from opsmith.checking.subject import LibraryWrite, Subject
from opsmith.core.operator import Operator

NAME = "mutation"


@dataclass(frozen=True)
class WriteFault:
    """One thing that is wrong with one call in place.

    Args:
        input: Label of the argument, or name of the result.
        cause: The word for it.
        words: The fault in a sentence.
        shown: The sample, dtype, device, place and mode.
        where: `file:line` of what computes it.
        difference: The worst element.
        place: The layout in which it was seen; empty for contiguous memory.
    """

    input: str
    cause: str
    words: str
    shown: str
    where: str
    difference: Difference | None = None
    place: str = ""


@dataclass
class WriteFindings:
    """Findings of one run of the property so far.

    Args:
        operator: The operator that writes in place.
        faults: Faults by input and cause.
        given: Names of the arguments of which a sample has a tensor with elements.
        rose: Names of those whose version the reference raises.
        changed: Names of those of which the reference changes an element.
    """

    operator: Operator[..., Any] | LibraryWrite
    faults: dict[tuple[str, str], list[WriteFault]] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    rose: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)

    def enter(self, fault: WriteFault) -> None:
        """Enter a fault."""
        self.faults.setdefault((fault.input, fault.cause), []).append(fault)

    def see(self, subject: Subject, sample: Sample) -> None:
        """Note what the reference writes into on a sample."""
        flat, names = sample.at(), sample.names
        positions = sample.flattening.positions(self.operator.specification.schema.written)
        filled = [at for at in positions if isinstance(flat[at], Tensor) and flat[at].numel()]
        found = ReferenceWrite.of(subject, sample, flat) if filled else None
        if found is not None:
            self.given.update(names[at] for at in filled)
            self.rose.update(names[at] for at in filled if at in found.rose)
            self.changed.update(names[at] for at in filled if SavedBits(found.after[at], flat[at]).written())

    def failures(self) -> Iterator[Failure]:
        """One failure for each input and cause, with the layouts in which it was seen."""
        for (input, cause), group in self.faults.items():
            first = group[0]
            evidence: dict[str, Any] = {"sample": first.shown}
            evidence.update(first.difference.evidence() if first.difference is not None else {})
            wrong = ", ".join(dict.fromkeys(each.place for each in group if each.place))
            evidence.update({"wrong for": wrong} if wrong else {})
            yield Failure(NAME, input, cause, first.words, first.where, evidence)


def never_written(subject: Subject, found: WriteFindings) -> Findings:
    """Report arguments that are declared, and that the reference never writes into."""
    specification = found.operator.specification
    for sample in subject.samples:  # those, too, that are not tried in layouts
        if found.changed == {*specification.schema.written}:
            return
        found.see(subject, sample)
    for name in specification.schema.written:
        if name in found.changed or any(input.partition("[")[0] == name for input, _ in found.faults):
            continue
        if name not in found.given:
            words, cause = f"no sample has a tensor with elements for `{name}`: add one", "not-exercised"
        elif name in found.rose:
            words, cause = f"no sample changes an element of `{name}`: add one that does", "not-exercised"
        else:
            at, writer = "`mutates=`", "the reference"
            if isinstance(found.operator, LibraryWrite):
                at, writer = "`mutates_args=` or its schema", "the operator"
            words, cause = (
                f"`{name}` is declared in {at}, and {writer} writes into it on no sample: take it "
                f"out of {at}, or write into it, as `.copy_(...)` does",
                "not-written",
            )
        yield Failure(NAME, name, cause, words, specification.where)


def half_written(subject: Subject, operator: Operator[..., Any] | LibraryWrite) -> Findings:
    """Report a kernel that writes before it raises, where the reference refuses before it writes."""
    if not subject.specification.kernels or subject.draws:
        return

    def failures() -> tuple[Failure, ...]:
        own = authored(subject)
        return tuple(
            failure
            for sample in forms(own)
            for refused in refused_calls(own, sample)
            for failure in _half_written_by(own, operator, refused.sample, refused.flat)
        )

    if in_child():
        yield from failures()
        return
    try:
        outcome = watched_in_child(NAME, subject, failures)
    except errors.UsageError as error:
        yield Note(f"calls that the reference refuses were not tried: {error.problem}")
        return
    for failure in outcome.failures:
        if failure.cause == HALF_WRITTEN:
            yield failure
        else:  # it dies or hangs in a call that is wrong, of which no other property knows
            yield Note(f"not all calls that the reference refuses were tried: {failure.message}")


HALF_WRITTEN = "half-written"


def _half_written_by(
    subject: Subject, operator: Operator[..., Any] | LibraryWrite, sample: Sample, flat: Sequence[Any]
) -> Iterator[Failure]:
    if _written_and_error(subject, operator.reference, sample, flat)[0]:
        return
    labels, error = _written_and_error(subject, operator, sample, flat)
    if error is not None:
        for label in labels:
            text = f"{type(error).__name__}: {first_line(error)}"
            message = (
                f"a call that raises ({text}) has written into `{label}` before, and the reference has not: "
                "look at shapes, dtypes and devices before the first write"
            )
            where = subject.specification.kernels[0].where
            evidence = {"sample": str(sample)}
            yield Failure(NAME, label, HALF_WRITTEN, message, where, evidence)


def _written_and_error(
    subject: Subject, call: Any, sample: Sample, flat: Sequence[Any]
) -> tuple[list[str], Exception | None]:
    """The labels of the arguments that a call wrote into, and what it raised."""
    given, caught = replicas(flat), None
    saved = {at: SavedBits.of(value) for at, value in enumerate(given) if isinstance(value, Tensor)}
    try:
        with without_logs(), torch.no_grad():
            in_place(subject, call).call(sample, given)
    except Exception as error:
        refuse_own(error)
        caught = error
    return [sample.labels[at] for at, bits in saved.items() if bits.written() is not None], caught
