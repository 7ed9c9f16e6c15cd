"""Mutation: a call in place writes what its functional form returns, and nothing else."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.checking.calls import rule_location
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
    WriteRun,
    compare_writes,
    in_place,
    places,
    reference_write,
    untouched,
    written_by,
)
from opsmith.checking.properties.kernels.sizes import authored, forms, refused_calls, watched_in_child
from opsmith.checking.property import (
    Coverage,
    Finding,
    Findings,
    Note,
    Property,
    Skipped,
    covered_samples,
    first_line,
    raised,
)
from opsmith.checking.report import Failure
from opsmith.checking.samples.batches import replicas
from opsmith.checking.samples.memory_layouts import CHUNK
from opsmith.checking.samples.sample import Sample
from opsmith.checking.side_effects.global_settings import without_logs
from opsmith.checking.subject import LibraryWrite, Subject
from opsmith.core.kernels import choose
from opsmith.core.operator import Operator
from opsmith.judging.compare import Difference, SavedBits, describe_write, exact_difference

NAME = "mutation"

Writer = Operator[..., Any] | LibraryWrite


def run(subject: Subject) -> Findings:
    """Write in place in every layout and mode, beside the functional form."""
    operator = subject.in_place
    if operator is None:
        yield Skipped("it is not declared to write into an argument")
        return
    found = WriteFindings()
    chosen = replace(subject, samples=samples_of_each_form(subject))

    def check_sample(subject: Subject, sample: Sample, coverage: Coverage) -> Findings:
        for form in layout_cases(subject, sample, forward_alone=True):
            if isinstance(form, Note):
                yield form
                continue
            case = WriteCase(form, operator)
            if case.written:
                coverage.ran += 1
                yield from CaseCheck(case, found).run()

    yield from covered_samples(NAME, check_sample, "no sample has a tensor that it writes into", chosen)
    yield from found.failures()
    yield from never_written(subject, operator, {str(input).partition("[")[0] for input, _ in found.faults})
    yield from half_written(subject, operator)


@dataclass
class WriteFindings:
    """Failures so far: the first for each input and cause, with the layouts in which it was seen.

    Args:
        faults: The first failure, and the names of the layouts, by input and cause.
        entered: Number of failures that were entered.
    """

    faults: dict[tuple[str | None, str], tuple[Failure, dict[str, None]]] = field(default_factory=dict)
    entered: int = 0

    def enter(self, failure: Failure, layout: str) -> None:
        """Enter a failure, seen in a layout; empty for contiguous memory."""
        _, layouts = self.faults.setdefault((failure.input, failure.cause), (failure, {}))
        layouts.update({layout: None} if layout else {})
        self.entered += 1

    def failures(self) -> Iterator[Failure]:
        """Yield one failure for each input and cause."""
        for failure, layouts in self.faults.values():
            wrong = {"wrong for": ", ".join(layouts)} if layouts else {}
            yield replace(failure, evidence={**failure.evidence, **wrong})


@dataclass
class CaseCheck:
    """The check of one sample in a dtype on a device.

    Args:
        case: The sample, written in place.
        found: Where faults are entered.
    """

    case: WriteCase
    found: WriteFindings

    def __post_init__(self) -> None:
        self.subject, self.sample, self.form = self.case.subject, self.case.sample, self.case.form
        specification = self.case.operator.specification
        accepted = choose(self.subject.specification.kernels, self.sample.flattening.pack(self.form.flat))[0]
        self.where = accepted.kernel.where if accepted else specification.where
        self.positions = self.sample.flattening.positions(specification.schema.written)

    def run(self) -> Findings:
        """Write in contiguous memory, again, in each mode and layout; stop where all would say the same."""
        alone = self.case.run(PLAIN, NO_GRAD)
        if alone.error is not None:
            yield raised(NAME, self.subject, alone.error, str(self.sample))
            return
        if not self._holds(self._elements(alone), PLAIN, NO_GRAD):
            return
        if not self._holds(self._faults(alone, PLAIN, NO_GRAD), PLAIN, NO_GRAD):
            return
        self._holds(self._again(alone), PLAIN, NO_GRAD)
        modes = (GRAD_MODE, INFERENCE, *([RECORDED] if self.form.runner.argnums else []))
        right: list[Mode] = []
        for mode in modes:
            if mode is GRAD_MODE:  # the first call of a process alone runs a kernel in Python in grad mode
                self.case.operator.forget_calls()
            fine = yield from self._tried(PLAIN, mode)
            right += [mode] if fine else []
        if not self.form.inputs_too:
            return  # it draws, and what is drawn for a tensor follows its layout
        every = [OFFSET, *places(self.form.flat, self.case.written)]
        for place in every[: self.subject.effort.layouts]:
            known = {input for input, _ in self.found.faults}
            if place.interleaved is not None and self._label(place) in known:
                continue  # a write beside its elements hits those of another argument
            fine = yield from self._tried(place, NO_GRAD)
            # torch refuses to write into chunks where it records, since each is one of several views.
            chunked = CHUNK in {each.name for each in place.layouts.values()}
            if fine and RECORDED in right and place.layouts and not chunked:
                yield from self._tried(place, RECORDED)

    def _tried(self, place: Place, mode: Mode) -> Generator[Finding, None, bool]:
        """Write in a place and a mode; return True if nothing is wrong."""
        run = self.case.run(place, mode)
        if run.error is None:
            return self._holds(self._faults(run, place, mode), place, mode)
        label, text = self._label(place), f"{type(run.error).__name__}: {first_line(run.error)}"
        if replace(self.case, referred=True).run(place, mode).error is not None:
            where = f", `{label}` {place.name}," if place.name else ""
            yield Note(f"a call {mode.name}{where} was left out, since the reference raises, too: {text}")
        elif not place.name:
            yield raised(NAME, self.subject, run.error, f"{self.sample}, {mode.name}")
        elif is_stated(run.error) and not run.in_backward:
            yield Note(f"it does not take `{label}` {place.name}, and says so: {text}")
        else:
            wrong = self._failure(label, "layout", f"{self._right_elsewhere(label, place)}: {text}")
            self._holds([wrong], place, mode)
        return False

    def _holds(self, failures: Iterable[Failure], place: Place, mode: Mode) -> bool:
        """Enter what is wrong with a call, one after another; return True if nothing is."""
        before = self.found.entered
        for failure in failures:
            shown = ", ".join(filter(None, (self.form.name, mode.name, place.name)))
            evidence = {"sample": shown, **failure.evidence}
            self.found.enter(replace(failure, evidence=evidence), place.name)
        return self.found.entered == before

    def _failure(
        self, input: str, cause: str, words: str, difference: Difference | None = None, where: str = ""
    ) -> Failure:
        evidence = {} if difference is None else difference.evidence()
        return Failure(NAME, input, cause, words, where or self.where, evidence)

    def _faults(self, run: WriteRun, place: Place, mode: Mode) -> Iterator[Failure]:
        """Yield all that is wrong with a call."""
        for argnum in run.moved:
            label = self.sample.labels[argnum]
            words = (
                f"a call lays other memory, or another shape, under `{label}` (`.data = `, `resize_`), and "
                "does not write into its own, which others share: write into that, as `.copy_(...)` does"
            )
            yield self._failure(label, "not-written", words)
        if not run.moved:
            yield from self._values(run, place, mode)
            yield from self._beside(run, place)

    def _values(self, run: WriteRun, place: Place, mode: Mode) -> Iterator[Failure]:
        """Compare new values, results and gradients with those of the functional form."""
        results = self.subject.results(self.sample)
        wrong = False
        for position, output in enumerate(run.outputs):
            if wrong and position >= len(results):
                return  # a gradient of a wrong result would report the same
            fault = self.form.twin.fault(position, output)
            if fault is None:
                continue
            wrong = True
            if position < len(results):
                label = self._written_label(position) or results[position].name
                cause, about, where = "kernel-mismatch", f"`{label}`", self.where
            else:
                argnum = self.form.runner.argnums[position - len(results)]
                label, about = self.sample.labels[argnum], f"the gradient of `{self.sample.labels[argnum]}`"
                cause = "unknown" if output is not None and bool(output.any()) else "missing-gradient"
                where = rule_location(self.subject, self.sample.names[argnum])
            words = f"{about} after a call {mode.name} is not that of the functional form: {fault}"
            if place.name:
                cause = "layout"
                words = f"{self._right_elsewhere(about, place)}: {fault}; follow its strides and its offset"
            yield self._failure(label, cause, words, fault, where)

    def _beside(self, run: WriteRun, place: Place) -> Iterator[Failure]:
        """Yield what a call wrote beside what it may write, and the writes that autograd does not see."""
        labels = self.sample.labels
        # Who ignores strides writes beside its elements.
        faulty = {input for input, cause in self.found.faults if cause == "layout"}
        outside: list[tuple[str, str, str | None]] = []
        for argnum, value in enumerate(run.given):
            if not isinstance(value, Tensor) or argnum in self.case.written:
                continue
            label, words = labels[argnum], SavedBits(value, self.form.flat[argnum]).written()
            if argnum in (place.interleaved or ()):
                between = f"`{label}`, whose elements lie between its own"
                outside.append((self._label(place), between, words))
            elif words is not None:
                hint = f"name it in `mutates=`, or work on a copy, `{self.sample.names[argnum]}.clone()`"
                text = f"a call wrote into `{label}`, which it does not declare: {words}; {hint}"
                yield self._failure(label, "mutates-input", text)
        outside += [(label, "memory of others", guard.outside()) for label, guard in run.guards.items()]
        for label, whose, words in outside:
            if words is not None and label not in faulty:
                text = (
                    f"a call writes outside of `{label}`, into {whose}: {words}; hold its indices to the "
                    "tensor's sizes and strides"
                )
                yield self._failure(label, "out-of-bounds", text)
        for argnum in dict.fromkeys((*run.unversioned, *run.unnoticed)):
            text = (
                f"a call writes into `{labels[argnum]}` and does not raise its version, so that a backward "
                "that saved the value from before takes the new one, in silence: write by torch's operations "
                "in place, and not through `.data`, `.numpy()` or a pointer"
            )
            yield self._failure(labels[argnum], "version", text)

    def _elements(self, alone: WriteRun) -> Iterator[Failure]:
        """Compare the elements that were written with those that the reference writes, bit by bit."""
        flat = self.form.flat
        reference = None if self.subject.draws else reference_write(self.subject, self.sample, flat)
        if reference is None:
            return
        known = untouched(self.case)
        for argnum in self.case.written:
            before, right, got = flat[argnum], reference.given[argnum], alone.given[argnum]
            label = self.sample.labels[argnum]
            if got.shape != before.shape:
                sizes = f"{list(before.shape)} to {list(got.shape)}"
                words = f"a call changes the sizes of `{label}` from {sizes}: write into its elements alone"
                yield self._failure(label, "shape", words)
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
                yield self._failure(label, "not-written", words)
            if bool(written.more.any()):
                more = exact_difference(torch.where(written.more, got, before), before)
                words = f"a call writes into `{label}` where the reference leaves it as it is: "
                yield self._failure(label, "overwritten", words + describe_write(more))

    def _again(self, alone: WriteRun) -> Iterator[Failure]:
        """Write a second time into what was written, beside the functional form of the values there."""
        flat = [*self.form.flat]
        for argnum in self.case.written:
            flat[argnum] = alone.given[argnum].clone()
        run = self.case.run(PLAIN, NO_GRAD, alone.given)
        twin = self.form.right([*flat, *self.form.grads])
        if twin.error is not None or run.error is not None:
            return  # new values may be none that it takes
        for position, output in enumerate(run.outputs):
            fault = twin.fault(position, output)
            if fault is not None:
                label = self._written_label(position) or self.subject.results(self.sample)[position].name
                words = (
                    f"a second call, on what the first one wrote, makes another `{label}` than the "
                    f"functional form of the same values: {fault}; keep nothing between calls"
                )
                yield self._failure(label, "stale-state", words, fault)

    def _written_label(self, position: int) -> str | None:
        """The label of the argument whose new value an output is."""
        return self.sample.labels[self.positions[position]] if position < len(self.positions) else None

    def _label(self, place: Place) -> str:
        first = next(iter(place.layouts), place.interleaved[0] if place.interleaved else self.case.written[0])
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
    with without_logs(), torch.no_grad():
        if written_by(in_place(subject, operator.reference), sample, replicas(flat)).changed:
            return
        run = written_by(in_place(subject, operator), sample, replicas(flat))
    if run.error is None:
        return
    for at in sorted(run.changed):
        label, text = sample.labels[at], f"{type(run.error).__name__}: {first_line(run.error)}"
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
    inputs="every",
    traits=("about-results", "sends-gradients"),
)
