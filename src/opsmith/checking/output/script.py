"""A replay for every failure that has none of its own: lines that show its cause, or its property again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch.autograd.gradcheck import GradcheckError

from opsmith.checking.causes import UNKNOWN
from opsmith.checking.output.calling import Calling, calling
from opsmith.checking.output.replay import check_again, replay
from opsmith.checking.report import Failure, Outcome
from opsmith.checking.samples.sample import Sample, is_inexact
from opsmith.checking.subject import Subject

Shows = Callable[[Exception], bool]

DEADLY = frozenset({"signal", "status", "limit"})
"""Evidence of a failure that ended the process, or had to be ended."""


def replayed(outcomes: Sequence[Outcome], subject: Subject, *, run: bool) -> list[Outcome]:
    """The outcomes, where each failure that follows from no other has a replay.

    Args:
        outcomes: What became of every property.
        subject: What was checked, with every input that it was checked on.
        run: Whether lines may be run here: not where they would kill the process.
    """
    return [
        replace(outcome, failures=tuple(_with_replay(failure, subject, run) for failure in outcome.failures))
        for outcome in outcomes
    ]


def _with_replay(failure: Failure, subject: Subject, run: bool) -> Failure:
    if failure.replay is not None or failure.follows is not None:
        return failure
    script = _by_cause(failure, subject) if run else None
    deadly = not DEADLY.isdisjoint(failure.evidence)
    return replace(failure, replay=script or check_again(subject, failure.property, isolate=deadly))


def _by_cause(failure: Failure, subject: Subject) -> str | None:
    """Lines that call the operator and show the cause, run once before they are shown; None without any."""
    shown = str(failure.evidence.get("sample", ""))
    sample = next((each for each in subject.samples if shown.startswith(str(each))), None)
    called = calling(subject)
    if sample is None or called is None:
        return None
    for wide, asking, ending, shows in _endings(failure, called, sample):
        flat = sample.at(torch.float64 if wide else None)
        if asking:
            flat = [value.requires_grad_() if is_inexact(value) else value for value in flat]
        script = replay(subject, sample, flat, ending, shows=shows)
        if script is not None:
            return script
    return None


def _endings(
    failure: Failure, called: Calling, sample: Sample
) -> Iterator[tuple[bool, bool, list[str], Shows]]:
    """Ways to show it: whether in float64, whether gradients are asked for, lines, what they raise."""
    call = called.call(sample)
    named = failure.evidence.get("exception")
    if isinstance(named, str):
        first = failure.message.removeprefix(f"{named}: ").splitlines()[0]

        def same(error: Exception) -> bool:
            said = str(error).splitlines()
            return type(error).__name__ == named and bool(said) and first.startswith(said[0])

        yield False, False, [call], same
        for parts in _parts(called, sample, failure):
            yield False, True, _backward(call, parts), same
        return
    if failure.cause == "mutates-input" and failure.input in sample.labels and "[" not in failure.input:
        label = failure.input
        held = [f"assert torch.equal({label}, before), {label}"]
        before = f"before = {label}.detach().clone()"
        yield False, False, [before, call, *held], _asserts
        for parts in _parts(called, sample, failure):
            yield False, True, [before, *_backward(call, parts), *held], _asserts
    if failure.cause == "nondeterministic":
        for parts in _parts(called, sample, failure):
            for part in parts:
                yield False, False, [f"assert torch.equal({call}{part}, {call}{part})"], _asserts
    if failure.property == "linearity" or failure.cause == "mutates-grad-output":
        for parts in _parts(called, sample, failure):
            yield from ((False, True, lines, _asserts) for lines in _of_grad(failure, sample, call, parts))
    words = (failure.property.replace("_", "-"), UNKNOWN)
    order = GRADCHECKS.get(failure.property) if failure.cause in words else None
    if order is not None:
        places = [at for at in sample.inexact if sample.flat[at].numel()]
        names = ", ".join(sample.labels[at] for at in places)
        if names and "[" not in names:
            yield True, True, [order.format(names=names, call=call)], _differs


GRADCHECKS: Mapping[str, str] = {
    "second_order": "torch.autograd.gradgradcheck(lambda {names}: {call}, ({names},))",
    "forward_mode": "torch.autograd.gradcheck(lambda {names}: {call}, ({names},), check_forward_ad=True, "
    "check_backward_ad=False, check_undefined_grad=False, check_batched_grad=False)",
}
"""torch's own comparison with finite differences, by the property that it shows."""


def _of_grad(failure: Failure, sample: Sample, call: str, parts: Sequence[str]) -> Iterator[list[str]]:
    """Lines about what comes in: twice as much gives twice as much, and it is not written into."""
    labels = (
        [failure.input] if failure.input in sample.labels else [sample.labels[at] for at in sample.inexact]
    )
    for label, part in ((label, part) for label in labels for part in parts if "[" not in label):
        begin = [f"y = {call}{part}", "grad = torch.ones_like(y)"]
        if failure.cause == "mutates-grad-output":
            yield [
                *begin,
                f"torch.autograd.grad(y, {label}, grad)",
                "assert torch.equal(grad, torch.ones_like(y)), grad",
            ]
            continue
        yield [
            *begin,
            f"(one,) = torch.autograd.grad(y, {label}, grad, retain_graph=True)",
            f"(two,) = torch.autograd.grad(y, {label}, 2 * grad)",
            "torch.testing.assert_close(two, 2 * one)",
        ]


def _parts(called: Calling, sample: Sample, failure: Failure) -> Iterator[list[str]]:
    """The code behind a call that picks each result; nothing where a call raises."""
    try:
        found = called.parts(sample)
    except (Exception, SystemExit):  # it is what the failure is about
        found = [("", "")] if failure.cause == "raises" else None
    if found is not None:
        yield [mine for mine, _ in found]


def _backward(call: str, parts: Sequence[str]) -> list[str]:
    if len(parts) == 1:
        return [f"{call}{parts[0]}.sum().backward()"]
    every = ", ".join(f"results{part}" for part in parts)
    return [f"results = {call}", f"sum(each.sum() for each in ({every}) if each.requires_grad).backward()"]


def _asserts(error: Exception) -> bool:
    return isinstance(error, AssertionError)


def _differs(error: Exception) -> bool:
    """Whether `gradcheck` says that numbers differ, and does not merely refuse what it was given."""
    return isinstance(error, GradcheckError) and "mismatch" in str(error)
