"""Export: a program calls the operator and gives the same results, for these sizes and for others."""

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
    step_of,
)
from opsmith.checking.properties.torch.forms import Raised, attempt
from opsmith.checking.property import Findings, Note, Property, Skipped
from opsmith.checking.report import Failure
from opsmith.checking.samples.batches import replicas
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.core.call_arguments import tensors_in

NAME = "export"


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


def run(subject: Subject) -> Findings:
    """Export one model that calls the operator on all samples, and one that takes other sizes."""
    if not subject.effort.compiled:
        yield Skipped(f"the effort is `{subject.effort.name}`, which compiles nothing")
        return
    exporting = Exporting(subject)
    calls = yield from exporting.calls("no exported program takes one", backward=False)
    if calls:
        yield from exporting.static(calls)
        yield from exporting.dynamic(calls)
    if not exporting.ran:
        yield Skipped("nothing of it could be exported" if calls else "no sample can be exported")


class Exporting(Tracing):
    """`torch.export.export`."""

    property, done, words = NAME, "exported", "in an exported program, "

    def __str__(self) -> str:
        return "torch.export.export(..., strict=False)"

    def takes(self, sample: Sample) -> bool:
        """True for a sample with a tensor."""
        return any(isinstance(value, Tensor) for value in sample.flat)

    def static(self, calls: Sequence[PlainCall]) -> Findings:
        """Export all samples together; if that fails, each alone, to find the one that fails."""
        program = attempt(partial(_program, calls))
        if not isinstance(program, Raised):
            self.ran = True
            yield from self._node(program, len(calls))
            yield from self.judged(calls, _results(program, calls))
        elif len(calls) > 1:
            for one in calls:
                yield from self.static([one])
        else:
            yield from self.refused(calls, program.error)

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
        yield Failure(NAME, None, "unknown", message, subject.specification.where, {"targets": others})


def _program(calls: Sequence[PlainCall], **options: Any) -> Any:
    """Export a model in silence: of one that it refuses, torch also prints the whole graph to stderr."""
    with redirect_stderr(StringIO()), torch.no_grad():
        return torch.export.export(Calls(calls), _inputs(calls), strict=False, **options)


def _results(program: Any, calls: Sequence[PlainCall]) -> list[TracedCall]:
    """The results of a program for other arguments."""
    with calls[0].subject.seeded(), torch.no_grad():
        returned = program.module()(*_inputs(calls))
    return [TracedCall(call.results_in(each)) for call, each in zip(calls, returned, strict=True)]


EXPORT = Property(
    NAME,
    "an exported program calls it, and gives what it gives",
    run,
    compiles=True,
    varied=True,
    transforms=True,
    given=of_tools,
    group="integration",
)
