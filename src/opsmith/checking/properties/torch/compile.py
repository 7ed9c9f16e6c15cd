"""Compiled code: same results and gradients as the operator, with static and dynamic sizes, in one graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from opsmith.checking.promises import of_tools
from opsmith.checking.properties.torch.compiled_calls import (
    PlainCall,
    TracedCall,
    Tracing,
    other_sizes,
    reason_of,
    run_step,
    step_of,
)
from opsmith.checking.properties.torch.forms import Raised, attempt
from opsmith.checking.property import Findings, Note, Property, Skipped
from opsmith.checking.report import Failure
from opsmith.checking.subject import Subject
from opsmith.torch_library.torch_messages import CHANCE_GUARD, RECOMPILED, has_message

NAME = "compile"


def run(subject: Subject) -> Findings:
    """Compile one function that calls the operator on all samples; run it forward and backward."""
    if not subject.effort.compiled:
        yield Skipped(f"the effort is `{subject.effort.name}`, which compiles nothing")
        return
    backends = ("aot_eager", "inductor") if subject.effort.exhaustive else ("aot_eager",)
    ways = [Compilation(subject, backend, dynamic) for backend in backends for dynamic in (False, True)]
    calls = yield from ways[0].calls("torch does not compile a call with one", backward=True)
    if not calls:
        yield Skipped("no sample can be compiled")
        return
    for compilation in ways:
        found = [*compilation.compare(_resizable(calls) if compilation.dynamic else calls)]
        yield from found
        if any(isinstance(each, Failure) for each in found):
            return  # other backends would report the same
    if not any(compilation.ran for compilation in ways):
        yield Skipped("nothing of it could be compiled")


def _resizable(calls: Sequence[PlainCall]) -> Sequence[PlainCall]:
    """Calls to compile for any size: one sample that comes in other sizes; all with exhaustive effort."""
    if calls[0].subject.effort.exhaustive:
        return calls
    return [call for call in calls if other_sizes(call) is not None][:1] or calls[:1]


class Compilation(Tracing):
    """A backend of `torch.compile`, with sizes that are symbols if it is dynamic."""

    property, done = NAME, "compiled"

    def __init__(self, subject: Subject, backend: str, dynamic: bool) -> None:
        super().__init__(subject)
        self.backend, self.dynamic = backend, dynamic
        self.words = f"compiled by {self}, "

    def __str__(self) -> str:
        return f"torch.compile(..., dynamic={self.dynamic}, backend={self.backend!r})"

    def compare(self, calls: Sequence[PlainCall]) -> Findings:
        """Compile all samples together; if that fails, each alone, to find the one that fails."""
        fullgraph, before = True, list[Exception]()
        step = self._compiled(fullgraph=True)
        found = attempt(partial(run_step, step, calls))
        if isinstance(found, Raised) and _breaks(found.error):
            yield Note(f"it breaks the graph: {reason_of(found.error)}")
            fullgraph, before = False, [found.error]
            found = attempt(partial(run_step, self._compiled(fullgraph=False), calls))
        if not isinstance(found, Raised):
            self.ran = True
            judged = [*self.judged(calls, found)]
            yield from judged
            if fullgraph and self.dynamic and not any(isinstance(each, Failure) for each in judged):
                yield from self._resized(step, calls)
        elif fullgraph and len(calls) > 1:
            for one in calls:
                yield from self.compare([one])
        else:
            yield from self.refused(calls, found.error, *before)

    def _compiled(self, *, fullgraph: bool) -> Any:
        step = step_of(self.subject)
        return torch.compile(step, backend=self.backend, dynamic=self.dynamic, fullgraph=fullgraph)

    def _resized(self, step: Any, calls: Sequence[PlainCall]) -> Findings:
        """Run the compiled code on other sizes: results must be right, without a recompilation."""
        resized = [other_sizes(call) for call in calls]
        others = [call if other is None else other for call, other in zip(calls, resized, strict=True)]
        plain = attempt(lambda: [other.run(backward=True) for other in others])
        if not any(resized) or isinstance(plain, Raised):
            return  # `forward` and `gradient` report it
        found = attempt(partial(_run_in, "fail_on_recompile", step, others))
        if isinstance(found, Raised) and has_message(found.error, RECOMPILED):
            why = _why_anew(found.error)
            if why is not None:
                message = f"with dynamic=True it is compiled anew for other sizes: {why}"
                where, evidence = self.subject.specification.where, {"sample": str(others[0].sample)}
                yield Failure(NAME, None, "recompiles", message, where, evidence)
            found = attempt(partial(_run_in, "default", step, others))
        if isinstance(found, Raised):
            yield from self.refused(others, found.error)
        else:
            yield from self.judged(others, found)


def _run_in(stance: str, step: Any, calls: Sequence[PlainCall]) -> list[TracedCall]:
    with torch.compiler.set_stance(stance):
        return run_step(step, calls)


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
