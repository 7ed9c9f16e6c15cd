"""Export: a program calls the operator and gives the same results, for these sizes and for others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import refuse_own
from opsmith.checking.promises import of_tools
from opsmith.checking.properties.torch.compiled_calls import (
    Flats,
    call_of,
    eager_calls,
    faults,
    other_sizes,
    reason_of,
    refused,
    run_step,
    step_of,
    tensors_inside,
)
from opsmith.checking.property import Findings, Note, Property, Skipped, of_exception
from opsmith.checking.report import Failure
from opsmith.checking.samples.batches import replicas
from opsmith.checking.samples.sample import Sample
from opsmith.checking.side_effects.global_settings import without_logs, without_warnings
from opsmith.checking.subject import Subject
from opsmith.core.tensors import sequence_like

NAME = "export"


class Calls(torch.nn.Module):
    """A model that calls an operator several times: tensors are inputs, other arguments are constants.

    Args:
        subject: The subject of the check.
        flats: Each sample, and the flat arguments to call it with.
    """

    def __init__(self, subject: Subject, flats: Flats) -> None:
        super().__init__()
        self.step: Callable[[Any], Any] = step_of(subject)
        self.calls = [call_of(subject, sample, flat) for sample, flat in flats]

    def forward(self, *given: Tensor) -> Any:
        """Results of each call."""
        rest = iter(given)
        return self.step([(_filled(args, rest), _filled(kwargs, rest)) for args, kwargs in self.calls])


def _filled(value: Any, given: Any) -> Any:
    """Arguments, with the tensors among them replaced, in their order."""
    if isinstance(value, Tensor):
        return next(given)
    if isinstance(value, list | tuple):
        return sequence_like(value, [_filled(each, given) for each in value])
    if isinstance(value, dict):
        return {name: _filled(each, given) for name, each in value.items()}
    return value


def _inputs(subject: Subject, flats: Flats) -> tuple[Tensor, ...]:
    """Copies of the tensors of several calls, as `Calls` takes them: the program may write into them."""
    calls = [call_of(subject, sample, replicas(flat)) for sample, flat in flats]
    return tuple(
        tensor
        for args, kwargs in calls
        for value in (*args, *kwargs.values())
        for tensor in tensors_inside(value)
    )


def run(subject: Subject) -> Findings:
    """Export one model that calls the operator on all samples, and one that takes other sizes."""
    if not subject.effort.compiled:
        yield Skipped(f"the effort is `{subject.effort.name}`, which compiles nothing")
        return
    flats = yield from eager_calls(
        subject,
        "no exported program takes one",
        lambda sample, error: Note(
            f"{sample} was left out, since it raises without `torch.export`: {reason_of(error)}"
        ),
        lambda sample: any(isinstance(value, Tensor) for value in sample.flat),
    )
    ran: list[str] = []
    if flats:
        yield from _static(subject, flats, ran)
        yield from _dynamic(subject, flats, ran)
    if not ran:
        yield Skipped("nothing of it could be exported" if flats else "no sample can be exported")


def _static(subject: Subject, flats: Flats, ran: list[str]) -> Findings:
    try:
        program = _program(Calls(subject, flats), _inputs(subject, flats))
    except Exception as error:
        refuse_own(error)
        if len(flats) > 1:  # to find the one that fails
            for one in flats:
                yield from _static(subject, [one], ran)
            return
        yield from _refused(subject, flats, error)
        return
    ran.append("static")
    yield from _node(subject, program, len(flats))
    yield from _compared(subject, program, flats)


def _dynamic(subject: Subject, flats: Flats, ran: list[str]) -> Findings:
    """Export a sample whose sizes vary among the derived inputs, and run the program on other sizes."""
    pairs = [(row, other_sizes(subject, row[0])) for row in flats]
    for (sample, flat), other in [(row, other) for row, other in pairs if other is not None][:1]:
        assert other is not None
        others = [(other, other.at())]
        inputs, resized = _inputs(subject, [(sample, flat)]), _inputs(subject, others)
        dims = tuple(
            {
                dim: torch.export.Dim.AUTO
                for dim, sizes in enumerate(zip(one.shape, two.shape, strict=True))
                if sizes[0] != sizes[1]
            }
            for one, two in zip(inputs, resized, strict=True)
        )
        try:
            program = _program(Calls(subject, [(sample, flat)]), inputs, dynamic_shapes=(dims,))
        except Exception as error:
            refuse_own(error)
            yield from _refused(subject, [(sample, flat)], error)
            return
        ran.append("dynamic")
        try:
            yield from _compared(subject, program, others)
        except Exception as error:
            refuse_own(error)
            yield Note(
                f"the export is fixed to this size, because of {type(error).__name__}: {reason_of(error)}"
            )


def _program(calls: Calls, inputs: tuple[Tensor, ...], **options: Any) -> Any:
    """Export a model in silence: of one that it refuses, torch also prints the whole graph to stderr."""
    with without_warnings(), without_logs(), redirect_stderr(StringIO()), torch.no_grad():
        return torch.export.export(calls, inputs, strict=False, **options)


def _node(subject: Subject, program: Any, calls: int) -> Findings:
    """Check that the program contains the operator itself, so that it can get another implementation."""
    if subject.torch_operator is None or subject.specification.inline:
        return
    name = str(subject.torch_operator)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    if targets.count(name) >= calls:
        return
    others = ", ".join(dict.fromkeys(targets)) or "nothing"
    message = f"the exported program calls `{name}` {targets.count(name)} times of {calls}, and {others}"
    yield Failure(NAME, None, "unknown", message, subject.specification.where, {"targets": others})


def _compared(subject: Subject, program: Any, flats: Flats) -> Findings:
    """Compare the results of a program with those of the operator."""
    eager = run_step(subject, step_of(subject), flats)
    module = program.module()
    inputs = _inputs(subject, flats)
    with without_warnings(), subject.seeded(), torch.no_grad():
        returned = module(*inputs)
    for (sample, flat), right, each in zip(flats, eager, returned, strict=True):
        got = right.like(tuple(tensors_inside(each)))
        for name, what, fault in faults(subject, sample, flat, right, got, ()):
            yield Failure(
                NAME,
                name,
                fault.cause,
                f"in an exported program, {what} is another than without: {fault}",
                subject.specification.where,
                {"sample": str(sample), **fault.evidence()},
            )


def _refused(subject: Subject, flats: Sequence[tuple[Sample, Any]], error: Exception) -> Findings:
    reason = refused(subject, error)
    sample = flats[0][0]
    if reason is not None:
        yield Note(f"sample {sample.position} cannot be exported: {reason}")
        return
    yield Failure(
        NAME,
        None,
        "raises",
        f"torch.export.export(..., strict=False) raises where a call does not: {type(error).__name__}: "
        f"{reason_of(error)}",
        subject.specification.where,
        of_exception(error, str(sample)),
    )


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
