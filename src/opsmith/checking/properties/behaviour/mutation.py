"""Mutation: a call in place writes what its functional form returns, and nothing else."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from opsmith.checking.calls import rule_location
from opsmith.checking.numerics.compare import Difference, SavedBits, describe_write, exact_difference
from opsmith.checking.properties.behaviour.layouts import (
    is_stated,
    layout_cases,
    samples_of_each_form,
)
from opsmith.checking.properties.behaviour.write_findings import (
    NAME,
    WriteFault,
    WriteFindings,
    half_written,
    never_written,
)
from opsmith.checking.properties.behaviour.write_runs import (
    GRAD_MODE,
    INFERENCE,
    NO_GRAD,
    OFFSET,
    PLAIN,
    RECORDED,
    Mode,
    Place,
    ReferenceWrite,
    WriteCase,
    WriteRun,
    compare_writes,
    places,
    untouched,
)
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
from opsmith.checking.samples.memory_layouts import CHUNK
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.core.kernels import choose


def run(subject: Subject) -> Findings:
    """Write in place in every layout and mode, beside the functional form."""
    operator = subject.in_place
    if operator is None:
        yield Skipped("it is not declared to write into an argument")
        return
    found = WriteFindings(operator)
    chosen = replace(subject, samples=samples_of_each_form(subject))

    def check_sample(subject: Subject, sample: Sample, coverage: Coverage) -> Findings:
        for case in layout_cases(subject, sample, forward_alone=True):
            if isinstance(case, Note):
                yield case
                continue
            writes = WriteCase(case, operator)
            if writes.written:
                coverage.ran += 1
                yield from CaseCheck(writes, found).run()

    yield from covered_samples(NAME, check_sample, "no sample has a tensor that it writes into", chosen)
    yield from found.failures()
    yield from never_written(subject, found)
    yield from half_written(subject, operator)


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
        self.subject, self.sample = self.case.case.runner.subject, self.case.sample
        values = self.sample.flattening.pack(self.case.case.flat)
        accepted = choose(self.subject.specification.kernels, values)[0]
        self.where = accepted.kernel.where if accepted else self.case.operator.specification.where
        schema = self.case.operator.specification.schema
        self.positions = self.sample.flattening.positions(schema.written)

    def run(self) -> Findings:
        """Write in contiguous memory, again, in each mode and layout; stop where all would say the same."""
        alone = self.case.run(PLAIN, NO_GRAD)
        if alone.error is not None:
            yield raised(NAME, self.subject, alone.error, str(self.sample))
            return
        if not self._elements(alone) or not self._holds(alone, PLAIN, NO_GRAD):
            return
        self._again(alone)
        modes = (GRAD_MODE, INFERENCE, *([RECORDED] if self.case.case.runner.argnums else []))
        right: list[Mode] = []
        for mode in modes:
            if mode is GRAD_MODE:  # the first call of a process alone runs a kernel in Python in grad mode
                self.case.operator.forget_calls()
            fine = yield from self._tried(PLAIN, mode)
            right += [mode] if fine else []
        if not self.case.case.inputs_too:
            return  # it draws, and what is drawn for a tensor follows its layout
        every = [OFFSET, *places(self.case.case.flat, self.case.written)]
        for place in every[: self.subject.effort.layouts]:
            if place.interleaved is not None and self._is_faulty(place):
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
            return self._holds(run, place, mode)
        label, text = self._label(place), f"{type(run.error).__name__}: {first_line(run.error)}"
        if replace(self.case, referred=True).run(place, mode).error is not None:
            where = f", `{label}` {place.name}," if place.name else ""
            yield Note(f"a call {mode.name}{where} was left out, since the reference raises, too: {text}")
        elif not place.name:
            yield raised(NAME, self.subject, run.error, f"{self.sample}, {mode.name}")
        elif is_stated(run.error) and not run.in_backward:
            yield Note(f"it does not take `{label}` {place.name}, and says so: {text}")
        else:
            self._enter(label, "layout", f"{self._right_elsewhere(label, place)}: {text}", place, mode)
        return False

    def _holds(self, run: WriteRun, place: Place, mode: Mode) -> bool:
        """Enter all that is wrong with a call; return True if nothing is."""
        before = sum(map(len, self.found.faults.values()))
        labels = self.sample.labels
        for argnum in run.moved:
            words = (
                f"a call lays other memory, or another shape, under `{labels[argnum]}` (`.data = `, "
                "`resize_`), and does not write into its own, which others share: write into that, as "
                "`.copy_(...)` does"
            )
            self._enter(labels[argnum], "not-written", words, place, mode)
        if not run.moved:
            self._values(run, place, mode)
            self._beside(run, place, mode)
        return sum(map(len, self.found.faults.values())) == before

    def _values(self, run: WriteRun, place: Place, mode: Mode) -> None:
        """Compare new values, results and gradients with those of the functional form."""
        results = self.subject.results(self.sample)
        wrong = False
        for position, output in enumerate(run.outputs):
            if wrong and position >= len(results):
                return  # a gradient of a wrong result would report the same
            fault = self.case.case.twin.fault(position, output)
            if fault is None:
                continue
            wrong = True
            if position < len(results):
                label = self._written_label(position) or results[position].name
                cause, about, where = "kernel-mismatch", f"`{label}`", self.where
            else:
                argnum = self.case.case.runner.argnums[position - len(results)]
                label, about = self.sample.labels[argnum], f"the gradient of `{self.sample.labels[argnum]}`"
                cause = "unknown" if output is not None and bool(output.any()) else "missing-gradient"
                where = rule_location(self.subject, self.sample.names[argnum])
            if place.name:
                cause = "layout"
                words = f"{self._right_elsewhere(about, place)}: {fault}; follow its strides and its offset"
            else:
                words = f"{about} after a call {mode.name} is not that of the functional form: {fault}"
            self._enter(label, cause, words, place, mode, fault, where)

    def _beside(self, run: WriteRun, place: Place, mode: Mode) -> None:
        """Enter what a call wrote beside what it may write, and the writes that autograd does not see."""
        labels, flat = self.sample.labels, self.case.case.flat
        # Who ignores strides writes beside its elements.
        faulty = {input for input, cause in self.found.faults if cause == "layout"}
        for argnum, value in enumerate(run.given):
            if isinstance(value, Tensor) and argnum not in self.case.written:
                words = SavedBits(value, flat[argnum]).written()
                if words is not None and argnum in (place.interleaved or ()):
                    label = self._label(place)
                    text = (
                        f"a call writes outside of `{label}`, into `{labels[argnum]}`, whose elements lie "
                        f"between its own: {words}; hold its indices to the tensor's sizes and strides"
                    )
                    if label not in faulty:
                        self._enter(label, "out-of-bounds", text, place, mode)
                elif words is not None:
                    hint = f"name it in `mutates=`, or work on a copy, `{self.sample.names[argnum]}.clone()`"
                    text = f"a call wrote into `{labels[argnum]}`, which it does not declare: {words}; {hint}"
                    self._enter(labels[argnum], "mutates-input", text, place, mode)
        for label, guard in run.guards.items():
            words = guard.outside()
            if words is not None and label not in faulty:
                text = (
                    f"a call writes outside of `{label}`, into memory of others: {words}; hold its indices "
                    "to the tensor's sizes and strides"
                )
                self._enter(label, "out-of-bounds", text, place, mode)
        for argnum in dict.fromkeys((*run.unversioned, *run.unnoticed)):
            text = (
                f"a call writes into `{labels[argnum]}` and does not raise its version, so that a backward "
                "that saved the value from before takes the new one, in silence: write by torch's operations "
                "in place, and not through `.data`, `.numpy()` or a pointer"
            )
            self._enter(labels[argnum], "version", text, place, mode)

    def _elements(self, alone: WriteRun) -> bool:
        """Compare the elements that were written with those that the reference writes, bit by bit."""
        flat = self.case.case.flat
        found = None if self.subject.draws else ReferenceWrite.of(self.subject, self.sample, flat)
        if found is None:
            return True
        right, known, fine = found.after, untouched(self.case), True
        for argnum in self.case.written:
            before, got, label = flat[argnum], alone.given[argnum], self.sample.labels[argnum]
            if got.shape != before.shape:
                sizes = f"{list(before.shape)} to {list(got.shape)}"
                words = f"a call changes the sizes of `{label}` from {sizes}: write into its elements alone"
                self._enter(label, "shape", words, PLAIN, NO_GRAD)
                fine = False
                continue
            if not before.numel() or right[argnum].shape != got.shape or right[argnum].dtype != got.dtype:
                continue
            written = compare_writes(before, right[argnum], got, known.get(argnum))
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
                self._enter(label, "not-written", words, PLAIN, NO_GRAD)
                fine = False
            if bool(written.more.any()):
                kept = torch.where(written.more, got, before)
                words = (
                    f"a call writes into `{label}` where the reference leaves it as it is: "
                    f"{describe_write(exact_difference(kept, before))}"
                )
                self._enter(label, "overwritten", words, PLAIN, NO_GRAD)
                fine = False
        return fine

    def _again(self, alone: WriteRun) -> None:
        """Write a second time into what was written, beside the functional form of the values there."""
        flat = [*self.case.case.flat]
        for argnum in self.case.written:
            flat[argnum] = alone.given[argnum].clone()
        run = self.case.run(PLAIN, NO_GRAD, alone.given)
        twin = self.case.case.right([*flat, *self.case.case.grads])
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
                self._enter(label, "stale-state", words, PLAIN, NO_GRAD, fault)

    def _written_label(self, position: int) -> str | None:
        """The label of the argument whose new value an output is."""
        return self.sample.labels[self.positions[position]] if position < len(self.positions) else None

    def _is_faulty(self, place: Place) -> bool:
        return any(input == self._label(place) for input, _ in self.found.faults)

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

    def _enter(
        self,
        input: str,
        cause: str,
        words: str,
        place: Place,
        mode: Mode,
        difference: Difference | None = None,
        where: str = "",
    ) -> None:
        shown = ", ".join(filter(None, (self.case.case.name, mode.name, place.name)))
        self.found.enter(WriteFault(input, cause, words, shown, where or self.where, difference, place.name))


MUTATION = Property(
    NAME,
    "a call in place writes what the functional form returns, and nothing else, wherever its arguments lie",
    run,
    varied=True,
    sends_gradients=True,
    about_gradients=False,
)
