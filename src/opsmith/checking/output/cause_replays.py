"""Replays by cause: for every failure that has no replay of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch.autograd.gradcheck import GradcheckError

from opsmith.checking.causes import UNKNOWN
from opsmith.checking.output.replay import ReplayTarget, check_again, replay, target_of
from opsmith.checking.properties import PROPERTIES
from opsmith.checking.report import Failure, Outcome
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.judging.tensors import is_inexact


def with_replays(outcomes: Sequence[Outcome], subject: Subject, *, run: bool) -> list[Outcome]:
    """Give a replay to each failure that no other explains.

    Args:
        outcomes: One for each property.
        subject: The operator under check, with every input that it was checked on.
        run: True if lines may be run here, since they do not end the process.
    """
    return [
        replace(outcome, failures=tuple(_with_replay(failure, subject, run) for failure in outcome.failures))
        for outcome in outcomes
    ]


def _with_replay(failure: Failure, subject: Subject, run: bool) -> Failure:
    if failure.replay is not None or not failure.is_whole():
        return failure
    found = _by_cause(failure, subject) if run else None
    again = found or check_again(subject, failure.property, isolate=failure.ends_process())
    return replace(failure, replay=again)


def _by_cause(failure: Failure, subject: Subject) -> str | None:
    """A replay that shows the cause; None if none is found."""
    shown = str(failure.evidence.get("sample", ""))
    sample = next((each for each in subject.samples if shown.startswith(str(each))), None)
    target = target_of(subject)
    if sample is None or target is None:
        return None

    def shows(error: Exception) -> bool:
        return _shows(error, failure)

    for lines, differentiated in _lines(failure, target, sample):
        wide = (
            lines[-1].startswith("torch.autograd.grad") and "check(" in lines[-1]
        )  # gradcheck takes float64
        flat = sample.at(torch.float64 if wide else None)
        if differentiated:
            flat = [value.requires_grad_() if is_inexact(value) else value for value in flat]
        found = replay(subject, sample, flat, lines, shows=shows)
        if found is not None:
            return found
    return None


def _shows(error: Exception, failure: Failure) -> bool:
    """True if an exception shows a failure: the same one, a failed assertion, or different numbers."""
    named = failure.evidence.get("exception")
    if isinstance(named, str):
        first = failure.message.removeprefix(f"{named}: ").splitlines()[0]
        lines = str(error).splitlines()
        return type(error).__name__ == named and bool(lines) and first.startswith(lines[0])
    refused = isinstance(error, GradcheckError) and "mismatch" in str(error)
    return refused or isinstance(error, AssertionError)


def _lines(failure: Failure, target: ReplayTarget, sample: Sample) -> Iterator[tuple[list[str], bool]]:
    """Lines that may show a failure, and whether the inputs require gradients."""
    call = target.call(sample)
    parts = _parts(target, sample, failure)
    if isinstance(failure.evidence.get("exception"), str):
        yield [call], False
        if parts is not None:
            yield _backward(call, parts), True
        return
    label = failure.input
    if failure.cause == "mutates-input" and label in sample.labels and "[" not in label:
        before = f"before = {label}.detach().clone()"
        held = f"assert torch.equal({label}, before), {label}"
        yield [before, call, held], False
        if parts is not None:
            yield [before, *_backward(call, parts), held], True
    if failure.cause == "nondeterministic":
        for part in parts or ():
            yield [f"assert torch.equal({call}{part}, {call}{part})"], False
    labels = [label] if label in sample.labels else [sample.labels[at] for at in sample.inexact]
    pairs = [(each, part) for each in labels for part in parts or () if each and "[" not in each]
    for each, part in pairs:
        begin = [f"y = {call}{part}", "grad = torch.ones_like(y)"]
        if failure.cause == "mutates-grad-output":
            taken = f"torch.autograd.grad(y, {each}, grad)"
            yield [*begin, taken, "assert torch.equal(grad, torch.ones_like(y)), grad"], True
        elif failure.property == "linearity":
            one = f"(one,) = torch.autograd.grad(y, {each}, grad, retain_graph=True)"
            two = f"(two,) = torch.autograd.grad(y, {each}, 2 * grad)"
            yield [*begin, one, two, "torch.testing.assert_close(two, 2 * one)"], True
    gradcheck = PROPERTIES[failure.property].gradcheck
    if target.subject.specification.gradients.surrogate:
        return  # it compares with differences, which a surrogate gradient never agrees with
    if gradcheck and failure.cause in (failure.property.replace("_", "-"), UNKNOWN):
        names = ", ".join(sample.labels[at] for at in sample.inexact if sample.flat[at].numel())
        if names and "[" not in names:
            yield [gradcheck.format(names=names, call=call)], True


def _parts(target: ReplayTarget, sample: Sample, failure: Failure) -> list[str] | None:
    """Subscript of each result after a call; None if a call raises."""
    try:
        found = target.parts(sample)
    except (Exception, SystemExit):  # the failure is about this exception
        found = [("", "")] if failure.cause == "raises" else None
    return None if found is None else [lines for lines, _ in found]


def _backward(call: str, parts: Sequence[str]) -> list[str]:
    if len(parts) == 1:
        return [f"{call}{parts[0]}.sum().backward()"]
    every = ", ".join(f"results{part}" for part in parts)
    return [f"results = {call}", f"sum(each.sum() for each in ({every}) if each.requires_grad).backward()"]
