"""Compiled code: same results and gradients as the operator, with static and dynamic sizes, in one graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from opsmith.checking.exceptions import refuse_own
from opsmith.checking.promises import of_tools
from opsmith.checking.properties.torch.compiled_calls import (
    RECORDED,
    Flats,
    Grads,
    StepValues,
    eager_calls,
    faults,
    grads_for,
    other_sizes,
    reason_of,
    refused,
    run_step,
    step_of,
)
from opsmith.checking.properties.torch.mapping import ResultFault
from opsmith.checking.property import Findings, Note, Property, Skipped, of_exception, raised
from opsmith.checking.report import Failure
from opsmith.checking.side_effects.global_settings import without_logs, without_warnings
from opsmith.checking.subject import Subject
from opsmith.torch_library.torch_messages import CHANCE_GUARD, RECOMPILED, has_message

NAME = "compile"


def run(subject: Subject) -> Findings:
    """Compile one function that calls the operator on all samples; run it forward and backward."""
    if not subject.effort.compiled:
        yield Skipped(f"the effort is `{subject.effort.name}`, which compiles nothing")
        return
    flats = yield from eager_calls(
        subject,
        "torch does not compile a call with one",
        lambda sample, error: raised(NAME, subject, error, str(sample)),
    )
    if not flats:
        yield Skipped("no sample can be compiled")
        return
    ran = False
    for backend in ("aot_eager", "inductor") if subject.effort.exhaustive else ("aot_eager",):
        for dynamic in (False, True):
            compilation = Compilation(subject, backend, dynamic)
            yield from compilation.compare(_resizable(subject, flats) if dynamic else flats)
            ran = ran or compilation.ran
            if compilation.failed:
                return  # other backends would report the same
    if not ran:
        yield Skipped("nothing of it could be compiled")


def _resizable(subject: Subject, flats: Flats) -> Flats:
    """Calls to compile for any size: one sample that comes in other sizes; all with exhaustive effort."""
    if subject.effort.exhaustive:
        return flats
    return [row for row in flats if other_sizes(subject, row[0]) is not None][:1] or flats[:1]


class Compilation:
    """A backend and mode of `torch.compile`, with the status of the run.

    Args:
        subject: The subject of the check.
        backend: Name of torch's backend.
        dynamic: True if sizes are symbols.
    """

    def __init__(self, subject: Subject, backend: str, dynamic: bool) -> None:
        self.subject, self.backend, self.dynamic = subject, backend, dynamic
        self.ran = self.failed = False

    def __str__(self) -> str:
        sizes = "dynamic=True" if self.dynamic else "dynamic=False"
        return f"torch.compile(..., {sizes}, backend={self.backend!r})"

    def compare(self, flats: Flats) -> Findings:
        """Compile all samples together; if that fails, each alone, to find the one that fails."""
        try:
            eager, grads = self._eager(flats)
        except Exception as error:
            refuse_own(error)
            words = f"it was left out, since it raises without `torch.compile`: {reason_of(error)}"
            yield Note(f"{words}: see `gradient`")
            return
        yield from self._run(flats, eager, grads, fullgraph=True)

    def _run(self, flats: Flats, eager: Sequence[StepValues], grads: Grads, *, fullgraph: bool) -> Findings:
        step = self._compiled(fullgraph=fullgraph)
        try:
            with without_warnings(), without_logs():
                found = run_step(self.subject, step, flats, grads)
        except Exception as error:
            refuse_own(error)
            if fullgraph and _breaks(error):
                yield Note(f"it breaks the graph: {reason_of(error)}")
                # Here, so that this error is the context of one that follows from it.
                yield from self._run(flats, eager, grads, fullgraph=False)
            elif fullgraph and len(flats) > 1:
                for one in flats:
                    yield from self.compare([one])
            else:
                yield from self._refused(flats, error)
            return
        self.ran = True
        yield from self._judged(flats, eager, found, grads)
        if fullgraph and self.dynamic and not self.failed:
            yield from self._resized(step, flats)

    def _eager(self, flats: Flats) -> tuple[list[StepValues], Grads]:
        grads = grads_for(self.subject, run_step(self.subject, step_of(self.subject), flats))
        return run_step(self.subject, step_of(self.subject), flats, grads), grads

    def _compiled(self, *, fullgraph: bool) -> Any:
        step = step_of(self.subject)
        return torch.compile(step, backend=self.backend, dynamic=self.dynamic, fullgraph=fullgraph)

    def _refused(self, flats: Flats, error: Exception) -> Findings:
        reason = refused(self.subject, error)
        samples = ", ".join(f"sample {sample.position}" for sample, _ in flats)
        if reason is not None:
            yield Note(f"{samples} of it cannot be compiled: {reason}")
            return
        self.failed = True
        yield Failure(
            NAME,
            None,
            "raises",
            f"{self} raises where a call does not: {type(error).__name__}: {reason_of(error)}",
            self.subject.specification.where,
            of_exception(error, str(flats[0][0])),
        )

    def _judged(
        self, flats: Flats, eager: Sequence[StepValues], found: Sequence[StepValues], grads: Grads
    ) -> Findings:
        rows = zip(flats, eager, found, grads, strict=True)
        for (sample, flat), right, got, given in rows:
            for name, what, fault in faults(self.subject, sample, flat, right, got, given):
                if fault.aspect == "graph" and (fault.got == RECORDED or self.subject.torch_operator is None):
                    yield Note(f"compiled, {what} {fault.got}; without, it {fault.expected}")
                    continue
                self.failed = True
                yield Failure(
                    NAME,
                    name,
                    cause_of(fault),
                    f"compiled by {self}, {what} is another than without: {fault}",
                    self.subject.specification.where,
                    {"sample": str(sample), **fault.evidence()},
                )

    def _resized(self, step: Any, flats: Flats) -> Findings:
        """Run the compiled code on other sizes: results must be right, without a recompilation."""
        others: Flats = []
        for sample, flat in flats:
            other = other_sizes(self.subject, sample)
            others.append((sample, flat) if other is None else (other, other.at()))
        if all(other is sample for (other, _), (sample, _) in zip(others, flats, strict=True)):
            return
        try:
            eager, grads = self._eager(others)
        except Exception as error:
            refuse_own(error)
            return  # `forward` and `gradient` report it
        for stance in ("fail_on_recompile", "default"):
            try:
                with without_warnings(), without_logs(), torch.compiler.set_stance(stance):
                    found = run_step(self.subject, step, others, grads)
                break
            except Exception as error:
                refuse_own(error)
                if stance == "default" or not has_message(error, RECOMPILED):
                    yield from self._refused(others, error)
                    return
                why = _why_anew(error)
                if why is not None:
                    message = f"with dynamic=True it is compiled anew for other sizes: {why}"
                    location = self.subject.specification.where
                    yield Failure(NAME, None, "recompiles", message, location, {"sample": str(others[0][0])})
        yield from self._judged(others, eager, found, grads)


def cause_of(fault: ResultFault) -> str:
    """Cause of a fault of compiled code."""
    return "missing-gradient" if fault.aspect == "graph" else fault.cause


def _breaks(error: BaseException) -> bool:
    """True if an exception is a refusal of dynamo, and not raised by the operator."""
    return type(error).__name__ in ("Unsupported", "UserError", "ArgsMismatchError")


def _why_anew(error: BaseException) -> str | None:
    """The guard that failed; None if it is not about sizes."""
    text = str(error)
    if has_message(error, CHANCE_GUARD):  # on sizes or a layout that were equal by chance
        return None
    return next(
        (line.strip(" -") for line in text.splitlines() if line.strip().startswith("- ")), reason_of(error)
    )


COMPILE = Property(
    NAME,
    "compiled code gives what the operator gives, forward and backward",
    run,
    compiles=True,
    varied=True,
    transforms=True,
    given=of_tools,
    group="integration",
)
