"""Compiled code and exported programs: same results and gradients as the operator, also for other sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from typing import Any

import torch
from torch import Tensor

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
from opsmith.checking.samples.batches import replicas
from opsmith.checking.subject import Subject
from opsmith.core.call_arguments import tensors_in
from opsmith.torch_library.torch_messages import CHANCE_GUARD, RECOMPILED, has_message

COMPILING, EXPORTING = "compile", "export"


def compiled(subject: Subject) -> Findings:
    """Compile one function that calls the operator on all samples; run it forward and backward."""
    if not subject.effort.full:
        yield Skipped(f"the effort is `{subject.effort.name}`, which compiles nothing")
        return
    backends = ("aot_eager", "inductor") if subject.effort.exhaustive else ("aot_eager",)
    ways = [Compilation(subject, backend, dynamic) for backend in backends for dynamic in (False, True)]
    calls = yield from ways[0].calls("torch does not compile a call with one")
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

    property, done = COMPILING, "compiled"

    def __init__(self, subject: Subject, backend: str, dynamic: bool) -> None:
        super().__init__(subject)
        self.backend, self.dynamic = backend, dynamic
        self.words = f"compiled by {self}, "

    def __str__(self) -> str:
        return f"torch.compile(..., dynamic={self.dynamic}, backend={self.backend!r})"

    def compare(self, calls: Sequence[PlainCall]) -> Findings:
        """Compile all samples together; if that fails, each alone, to find the one that fails."""
        broken, step = None, self._compiled(fullgraph=True)
        found = attempt(partial(run_step, step, calls))
        if isinstance(found, Raised) and _breaks(found.error):
            yield Note(f"it breaks the graph: {reason_of(found.error)}")
            broken = found.error
            found = attempt(partial(run_step, self._compiled(fullgraph=False), calls))
        if not isinstance(found, Raised):
            self.ran = True
            judged = [*self.judged(calls, found)]
            yield from judged
            if broken is None and self.dynamic and not any(isinstance(each, Failure) for each in judged):
                yield from self._resized(step, calls)
        elif broken is None:
            yield from self.alone(self.compare, calls, found.error)
        else:
            yield from self.refused(calls, found.error, broken)

    def _compiled(self, *, fullgraph: bool) -> Any:
        step = step_of(self.subject)
        return torch.compile(step, backend=self.backend, dynamic=self.dynamic, fullgraph=fullgraph)

    def _resized(self, step: Any, calls: Sequence[PlainCall]) -> Findings:
        """Run the compiled code on other sizes: results must be right, without a recompilation."""
        resized = [other_sizes(call) for call in calls]
        others = [call if other is None else other for call, other in zip(calls, resized, strict=True)]
        plain = attempt(lambda: [other.run(backward=True) for other in others if any(resized)])
        if not plain or isinstance(plain, Raised):
            return  # there are none, or `forward` and `gradient` report it
        found = attempt(partial(_run_in, "fail_on_recompile", step, others))
        if isinstance(found, Raised) and has_message(found.error, RECOMPILED):
            why = _why_anew(found.error)
            if why is not None:
                message = f"with dynamic=True it is compiled anew for other sizes: {why}"
                where, evidence = self.subject.specification.where, {"sample": str(others[0].sample)}
                yield Failure(COMPILING, None, "recompiles", message, where, evidence)
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


class Calls(torch.nn.Module):
    """A model that calls an operator several times: tensors are inputs, other arguments are constants."""

    def __init__(self, calls: Sequence[PlainCall]) -> None:
        super().__init__()
        self.step: Callable[[Any], Any] = step_of(calls[0].subject)
        self.calls = calls

    def forward(self, *given: Tensor) -> Any:
        """Results of each call."""
        rest = iter(given)
        rows = (
            [next(rest) if isinstance(value, Tensor) else value for value in call.flat] for call in self.calls
        )
        return self.step([call.arguments(row) for call, row in zip(self.calls, rows, strict=True)])


def _inputs(calls: Sequence[PlainCall]) -> tuple[Tensor, ...]:
    """Copies of the tensors of several calls, as `Calls` takes them: the program may write into them."""
    return tuple(tensors_in(replicas([value for call in calls for value in call.flat])))


def exported(subject: Subject) -> Findings:
    """Export one model that calls the operator on all samples, and one that takes other sizes."""
    if not subject.effort.full:
        yield Skipped(f"the effort is `{subject.effort.name}`, which compiles nothing")
        return
    exporting = Exporting(subject)
    calls = yield from exporting.calls("no exported program takes one")
    if calls:
        yield from exporting.static(calls)
        yield from exporting.dynamic(calls)
    if not exporting.ran:
        yield Skipped("nothing of it could be exported" if calls else "no sample can be exported")


class Exporting(Tracing):
    """`torch.export.export`."""

    property, done, words = EXPORTING, "exported", "in an exported program, "
    takes_tensors, backward = True, False

    def __str__(self) -> str:
        return "torch.export.export(..., strict=False)"

    def static(self, calls: Sequence[PlainCall]) -> Findings:
        """Export all samples together; if that fails, each alone, to find the one that fails."""
        program = attempt(partial(_program, calls))
        if not isinstance(program, Raised):
            self.ran = True
            yield from self._node(program, len(calls))
            yield from self.judged(calls, _results(program, calls))
        else:
            yield from self.alone(self.static, calls, program.error)

    def dynamic(self, calls: Sequence[PlainCall]) -> Findings:
        """Export a sample whose sizes vary among the derived inputs, and run the program on other sizes."""
        for call, other in [(call, other_sizes(call)) for call in calls]:
            if other is None:
                continue
            dims = tuple(
                {
                    dim: torch.export.Dim.AUTO
                    for dim, sizes in enumerate(zip(one.shape, two.shape, strict=True))
                    if sizes[0] != sizes[1]
                }
                for one, two in zip(_inputs([call]), _inputs([other]), strict=True)
            )
            program = attempt(partial(_program, [call], dynamic_shapes=(dims,)))
            if isinstance(program, Raised):
                yield from self.refused([call], program.error)
                return
            self.ran = True
            found = attempt(partial(_results, program, [other]))
            if isinstance(found, Raised):
                kind, reason = type(found.error).__name__, reason_of(found.error)
                yield Note(f"the export is fixed to this size, because of {kind}: {reason}")
            else:
                yield from self.judged([other], found)
            return

    def _node(self, program: Any, calls: int) -> Findings:
        """Check that the program contains the operator itself, so that it can get another implementation."""
        subject = self.subject
        if subject.torch_operator is None or subject.specification.inline:
            return
        name = str(subject.torch_operator)
        targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        if targets.count(name) >= calls:
            return
        others = ", ".join(dict.fromkeys(targets)) or "nothing"
        message = f"the exported program calls `{name}` {targets.count(name)} times of {calls}, and {others}"
        yield Failure(EXPORTING, None, "unknown", message, subject.specification.where, {"targets": others})


def _program(calls: Sequence[PlainCall], **options: Any) -> Any:
    """Export a model in silence: of one that it refuses, torch also prints the whole graph to stderr."""
    with redirect_stderr(StringIO()), torch.no_grad():
        return torch.export.export(Calls(calls), _inputs(calls), strict=False, **options)


def _results(program: Any, calls: Sequence[PlainCall]) -> list[TracedCall]:
    """The results of a program for other arguments."""
    with calls[0].subject.seeded(), torch.no_grad():
        returned = program.module()(*_inputs(calls))
    return [TracedCall(call.results_in(each)) for call, each in zip(calls, returned, strict=True)]


COMPILE = Property(
    COMPILING,
    "compiled code gives what the operator gives, forward and backward",
    compiled,
    inputs="every",
    traits=("compiles", "integration", "transforms"),
    given=of_tools,
)

EXPORT = Property(
    EXPORTING,
    "an exported program calls it, and gives what it gives",
    exported,
    inputs="every",
    traits=("compiles", "integration", "transforms"),
    given=of_tools,
)
