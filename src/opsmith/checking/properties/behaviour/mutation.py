"""Mutation: a call in place writes what its functional form returns, and nothing else."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.checking.exceptions import error_words
from opsmith.checking.processes.fork import in_child
from opsmith.checking.properties.behaviour.layouts import is_stated, layout_cases, samples_of_each_form
from opsmith.checking.properties.behaviour.write_runs import (
    GRAD_MODE,
    INFERENCE,
    NO_GRAD,
    OFFSET,
    PLAIN,
    RECORDED,
    Mode,
    Place,
    WriteCase,
    Writer,
    WriteRun,
    compare_writes,
    in_place,
    places,
    reference_write,
    written_by,
)
from opsmith.checking.properties.kernels.sizes import authored, forms, refused_calls, watched_in_child
from opsmith.checking.property import Coverage, Finding, Findings, Note, Property, Skipped, raised
from opsmith.checking.report import Failure
from opsmith.checking.run import Run, covered_runs
from opsmith.checking.samples.batches import replicas
from opsmith.checking.samples.memory_layouts import CHUNK
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import LibraryWrite, Subject
from opsmith.core.cached_property import cached_property
from opsmith.judging.compare import Difference, SavedBits, describe_write, exact_difference

NAME = "mutation"


def run(subject: Subject) -> Findings:
    """Write in place in every layout and mode, beside the functional form."""
    operator = subject.in_place
    if operator is None:
        yield Skipped("it is not declared to write into an argument")
        return
    found: dict[tuple[str | None, str], list[Failure]] = {}

    def check(run: Run, coverage: Coverage) -> Findings:
        kind = partial(CheckedWrite, operator=operator, found=found)
        for case in layout_cases(kind, run, forward_alone=True):
            if isinstance(case, Note):
                yield case
            elif case.written:
                coverage.ran += 1
                yield from case.check()

    chosen = samples_of_each_form(subject)
    yield from covered_runs(NAME, check, "no sample has a tensor that it writes into", chosen)
    for failures in found.values():  # one for each input and cause
        layouts = dict.fromkeys(each.evidence[LAYOUT] for each in failures if LAYOUT in each.evidence)
        shown = {LAYOUT: ", ".join(layouts)} if layouts else {}
        yield replace(failures[0], evidence={**failures[0].evidence, **shown})
    yield from never_written(subject, operator, {str(input).partition("[")[0] for input, _ in found})
    yield from half_written(subject, operator)


LAYOUT = "wrong for"
"""Evidence of a layout in which it is wrong."""


@dataclass(frozen=True)
class CheckedWrite(WriteCase):
    """The check of one sample in a dtype on a device.

    Args:
        found: Failures so far are entered here, by input and cause.
    """

    found: dict[tuple[str | None, str], list[Failure]] = field(default_factory=dict)

    @cached_property
    def where(self) -> str:
        """`file:line` of what writes."""
        kernel = self.kernel(self.given)
        return kernel.where if kernel else self.operator.specification.where

    @cached_property
    def labels(self) -> list[str]:
        """The labels of the new values, then the names of the further results."""
        labels, results = self.sample.labels, [each.name for each in self.subject.results(self.sample)]
        written = self.sample.flattening.positions(self.operator.specification.schema.written)
        return [*(labels[argnum] for argnum in written), *results[len(written) :]]

    def check(self) -> Findings:
        """Write in contiguous memory, again, in each mode and layout; stop where all would say the same."""
        alone = self.write(PLAIN, NO_GRAD)
        if alone.error is not None:
            yield raised(NAME, self.subject, alone.error, str(self.sample))
            return
        if not self._holds(self._elements(alone), PLAIN, NO_GRAD):
            return
        if not self._holds(self._faults(alone, PLAIN, NO_GRAD), PLAIN, NO_GRAD):
            return
        self._holds(self._again(alone), PLAIN, NO_GRAD)
        recorded = False
        for mode in (GRAD_MODE, INFERENCE, *([RECORDED] if self.argnums else [])):
            if mode is GRAD_MODE:  # the first call of a process alone runs a kernel in Python in grad mode
                self.operator.forget_calls()
            recorded = (yield from self._tried(PLAIN, mode)) and mode is RECORDED
        if not self.inputs_too:
            return  # it draws, and what is drawn for a tensor follows its layout
        for place in [OFFSET, *places(self.given, self.written)][: self.subject.effort.layouts]:
            if place.interleaved is not None and self._label(place) in {input for input, _ in self.found}:
                continue  # a write beside its elements hits those of another argument
            fine = yield from self._tried(place, NO_GRAD)
            # torch refuses to write into chunks where it records, since each is one of several views.
            chunked = CHUNK in {each.name for each in place.layouts.values()}
            if fine and recorded and place.layouts and not chunked:
                yield from self._tried(place, RECORDED)

    def _tried(self, place: Place, mode: Mode) -> Generator[Finding, None, bool]:
        """Write in a place and a mode; return True if nothing is wrong."""
        run = self.write(place, mode)
        if run.error is None:
            return self._holds(self._faults(run, place, mode), place, mode)
        label, text = self._label(place), error_words(run.error)
        if replace(self, referred=True).write(place, mode).error is not None:
            where = f", `{label}` {place.name}," if place.name else ""
            yield Note(f"a call {mode.name}{where} was left out, since the reference raises, too: {text}")
        elif not place.name:
            yield raised(NAME, self.subject, run.error, f"{self.sample}, {mode.name}")
        elif is_stated(run.error) and not run.in_backward:
            yield Note(f"it does not take `{label}` {place.name}, and says so: {text}")
        else:
            wrong = self._wrong(label, "layout", f"{self._right_elsewhere(label, place)}: {text}")
            self._holds([wrong], place, mode)
        return False

    def _holds(self, failures: Iterable[Failure], place: Place, mode: Mode) -> bool:
        """Enter what is wrong with a call, one after another; return True if nothing is."""
        fine = True
        shown = {"sample": ", ".join(filter(None, (str(self), mode.name, place.name)))}
        shown |= {LAYOUT: place.name} if place.name else {}
        for each in failures:
            fine, failure = False, replace(each, evidence={**each.evidence, **shown})
            self.found.setdefault((failure.input, failure.cause), []).append(failure)
        return fine

    def _wrong(
        self, input: str, cause: str, words: str, difference: Difference | None = None, where: str = ""
    ) -> Failure:
        shown = {} if difference is None else difference.evidence()
        return self.failure(input, cause, words, where or self.where, shown)

    def _faults(self, run: WriteRun, place: Place, mode: Mode) -> Iterator[Failure]:
        """Yield all that is wrong with a call."""
        for argnum in run.moved:
            label = self.sample.labels[argnum]
            words = (
                f"a call lays other memory, or another shape, under `{label}` (`.data = `, `resize_`), and "
                "does not write into its own, which others share: write into that, as `.copy_(...)` does"
            )
            yield self._wrong(label, "not-written", words)
        if not run.moved:
            yield from self._values(run, place, mode)
            yield from self._beside(run, place)

    def _values(self, run: WriteRun, place: Place, mode: Mode) -> Iterator[Failure]:
        """Compare new values, results and gradients with those of the functional form."""
        wrong = False
        for position, output in enumerate(run.outputs):
            at = position - len(self.labels)
            if wrong and at >= 0:
                return  # a gradient of a wrong result would report the same
            fault = self.twin.fault(position, output)
            if fault is None:
                continue
            wrong = True
            if at < 0:
                label, cause, where = self.labels[position], "kernel-mismatch", self.where
                about = f"`{label}`"
            else:
                label, where = self.sample.labels[self.argnums[at]], self.backward_location(at)
                cause = "unknown" if output is not None and bool(output.any()) else "missing-gradient"
                about = f"the gradient of `{label}`"
            words = f"{about} after a call {mode.name} is not that of the functional form: {fault}"
            if place.name:
                cause = "layout"
                words = f"{self._right_elsewhere(about, place)}: {fault}; follow its strides and its offset"
            yield self._wrong(label, cause, words, fault, where)

    def _beside(self, run: WriteRun, place: Place) -> Iterator[Failure]:
        """Yield what a call wrote beside what it may write, and the writes that autograd does not see."""
        labels = self.sample.labels
        # Who ignores strides writes beside its elements.
        faulty = {input for input, cause in self.found if cause == "layout"}
        outside: list[tuple[str, str, str | None]] = []
        for argnum, value in enumerate(run.given):
            if not isinstance(value, Tensor) or argnum in self.written:
                continue
            label, words = labels[argnum], SavedBits(value, self.given[argnum]).written()
            if argnum in (place.interleaved or ()):
                between = f"`{label}`, whose elements lie between its own"
                outside.append((self._label(place), between, words))
            elif words is not None:
                hint = f"name it in `mutates=`, or work on a copy, `{self.sample.names[argnum]}.clone()`"
                text = f"a call wrote into `{label}`, which it does not declare: {words}; {hint}"
                yield self._wrong(label, "mutates-input", text)
        outside += [(label, "memory of others", guard.outside()) for label, guard in run.guards.items()]
        for label, whose, words in outside:
            if words is not None and label not in faulty:
                text = (
                    f"a call writes outside of `{label}`, into {whose}: {words}; hold its indices to the "
                    "tensor's sizes and strides"
                )
                yield self._wrong(label, "out-of-bounds", text)
        for argnum in dict.fromkeys(run.unnoticed):
            text = (
                f"a call writes into `{labels[argnum]}` and does not raise its version, so that a backward "
                "that saved the value from before takes the new one, in silence: write by torch's operations "
                "in place, and not through `.data`, `.numpy()` or a pointer"
            )
            yield self._wrong(labels[argnum], "version", text)

    def _elements(self, alone: WriteRun) -> Iterator[Failure]:
        """Compare the elements that were written with those that the reference writes, bit by bit."""
        reference = None if self.subject.draws else reference_write(self.subject, self.sample, self.given)
        if reference is None:
            return
        known = self.untouched()
        for argnum in self.written:
            before, right, got = self.given[argnum], reference.given[argnum], alone.given[argnum]
            label = self.sample.labels[argnum]
            if got.shape != before.shape:
                sizes = f"{list(before.shape)} to {list(got.shape)}"
                words = f"a call changes the sizes of `{label}` from {sizes}: write into its elements alone"
                yield self._wrong(label, "shape", words)
                continue
            if not before.numel() or right.shape != got.shape or right.dtype != got.dtype:
                continue
            written = compare_writes(before, right, got, known.get(argnum))
            count = int(written.left.sum())
            if count:
                at = f", the first at {written.left.nonzero()[0].tolist()}" if got.dim() else ""
                words = (
                    f"a call writes nothing into `{label}`, and the reference does: write into its own "
                    "memory, as `.copy_(...)` does"
                    if count == written.every
                    else f"a call leaves {count} of the {written.every} elements of `{label}` as they were "
                    f"that the reference writes{at}: write all of them"
                )
                yield self._wrong(label, "not-written", words)
            if bool(written.more.any()):
                more = exact_difference(torch.where(written.more, got, before), before)
                words = f"a call writes into `{label}` where the reference leaves it as it is: "
                yield self._wrong(label, "overwritten", words + describe_write(more))

    def _again(self, alone: WriteRun) -> Iterator[Failure]:
        """Write a second time into what was written, beside the functional form of the values there."""
        values = [*self.contiguous]
        for argnum in self.written:
            values[argnum] = alone.given[argnum].clone()
        run = self.write(PLAIN, NO_GRAD, alone.given)
        twin = self.right(values)
        if twin.error is not None or run.error is not None:
            return  # new values may be none that it takes
        for label, (position, output) in zip(self.labels, enumerate(run.outputs), strict=True):
            fault = twin.fault(position, output)
            if fault is not None:
                words = (
                    f"a second call, on what the first one wrote, makes another `{label}` than the "
                    f"functional form of the same values: {fault}; keep nothing between calls"
                )
                yield self._wrong(label, "stale-state", words, fault)

    def _label(self, place: Place) -> str:
        first = next(iter(place.layouts), place.interleaved[0] if place.interleaved else self.written[0])
        return self.sample.labels[first]

    def _right_elsewhere(self, about: str, place: Place) -> str:
        beside = ""
        if place.interleaved is not None:
            beside = f" with `{self.sample.labels[place.interleaved[1]]}` in memory"
        label = self._label(place)
        about = about if about.startswith(("`", "the ")) else f"`{about}`"
        return f"{about} is right where `{label}` is contiguous, and wrong where it is {place.name}{beside}"


def never_written(subject: Subject, operator: Writer, faulty: set[str]) -> Findings:
    """Report arguments that are declared, and that the reference never writes into.

    Args:
        subject: The subject, whose samples are all tried, not those alone that get layouts.
        operator: The operator that writes in place.
        faulty: Names of the arguments that have a failure already.
    """
    specification = operator.specification
    names = specification.schema.written
    given: set[str] = set()
    rose: set[str] = set()
    changed: set[str] = set()
    for sample in subject.samples:
        if changed == {*names}:
            return
        flat, positions = sample.at(), sample.flattening.positions(names)
        filled = {at for at in positions if isinstance(flat[at], Tensor) and flat[at].numel()}
        found = reference_write(subject, sample, flat) if filled else None
        if found is not None:
            given.update(sample.names[at] for at in filled)
            rose.update(sample.names[at] for at in filled & found.rose)
            changed.update(sample.names[at] for at in filled & found.changed)
    for name in names:
        if name in changed or name in faulty:
            continue
        cause, words = "not-exercised", f"no sample changes an element of `{name}`: add one that does"
        if name not in given:
            words = f"no sample has a tensor with elements for `{name}`: add one"
        elif name not in rose:
            at, writer = "`mutates=`", "the reference"
            if isinstance(operator, LibraryWrite):
                at, writer = "`mutates_args=` or its schema", "the operator"
            cause, words = (
                "not-written",
                f"`{name}` is declared in {at}, and {writer} writes into it on no sample: take it "
                f"out of {at}, or write into it, as `.copy_(...)` does",
            )
        yield Failure(NAME, name, cause, words, specification.where)


HALF_WRITTEN = "half-written"


def half_written(subject: Subject, operator: Writer) -> Findings:
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


def _half_written_by(
    subject: Subject, operator: Writer, sample: Sample, flat: Sequence[Any]
) -> Iterator[Failure]:
    with torch.no_grad():
        if written_by(in_place(subject, operator.reference), sample, replicas(flat)).changed:
            return
        run = written_by(in_place(subject, operator), sample, replicas(flat))
    if run.error is None:
        return
    for at in sorted(run.changed):
        label, text = sample.labels[at], error_words(run.error)
        message = (
            f"a call that raises ({text}) has written into `{label}` before, and the reference has not: look "
            "at shapes, dtypes and devices before the first write"
        )
        where = subject.specification.kernels[0].where
        yield Failure(NAME, label, HALF_WRITTEN, message, where, {"sample": str(sample)})


MUTATION = Property(
    NAME,
    "a call in place writes what the functional form returns, and nothing else, wherever its arguments lie",
    run,
    varied=True,
    sends_gradients=True,
    about_gradients=False,
)
