"""No state is carried from call to call: what one gives depends on no other, on no mode and no thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.agreement import differ, what_differs
from opsmith.checking.alive import Answer, answer
from opsmith.checking.bits import same_bits
from opsmith.checking.differentiated import differentiated, rule_place
from opsmith.checking.forgetting import Memory
from opsmith.checking.mistakes import Overlooking, refuse_own
from opsmith.checking.modes import by_mode
from opsmith.checking.other_values import other_forms, scaled, turned
from opsmith.checking.property import Findings, Note, Property, each_sample, first_line
from opsmith.checking.report import Failure
from opsmith.checking.sample import Sample
from opsmith.checking.scenes import MINE, OTHER, SCENES, Heard, Made, Scene, Stage, in_threads
from opsmith.checking.seeding import seeds
from opsmith.checking.subject import Subject

NAME = "state"
MOST = {"quick": 1, "default": 3}
"""Samples that are looked at by level of effort: what an operator remembers, it does for every one."""

NEIGHBOURS = 2
"""Samples of other shapes whose calls come before and between."""


def run(subject: Subject) -> Findings:
    """Make each sample's call alone, and then among others, and compare what it gives."""
    own = [sample for sample in subject.samples if not sample.origin]
    most = MOST.get(subject.effort.name, len(own))
    few = replace(subject, samples=tuple(own[:most]))
    yield from each_sample(NAME, few, partial(_sample, every=subject.samples))
    if len(own) > most:
        few_words = "only the first was" if most == 1 else f"the first {most} were"
        yield Note(f"of {len(own)} samples, {few_words} looked at")


def _sample(subject: Subject, sample: Sample, every: Sequence[Sample]) -> Findings:
    places = differentiated(subject, sample).places
    for device in subject.devices:
        made = Made(sample, places, partial(sample.at, device=device))
        memory = Memory.of(subject, partial(_call, subject, made))
        with memory.away():
            unsteady = _unsteady(subject, made, memory)
            if unsteady is not None:
                yield unsteady
                continue
            stage = Stage(subject, memory, {MINE: made, **dict(_others(subject, made, every, device))})
            stage.prepare()
            yield from _compared(stage, SCENES if sample is subject.samples[0] else SCENES[:2])


def _unsteady(subject: Subject, made: Made, memory: Memory) -> Failure | None:
    """What is wrong where two runs of the same call differ, though all that it remembers was put away."""
    runs = []
    for _ in range(2):
        memory.forget()
        runs.append(_tensors(_call(subject, made)))
    for one, other in zip(*runs, strict=True):
        if differ(one, other):
            message = (
                f"the same call gives something else the second time: {what_differs(one, other)}; the first "
                "time is taken as right"
            )
            evidence = {"sample": str(made.sample)}
            where = subject.specification.where
            return Failure(NAME, None, "nondeterministic", message, where, evidence)
    return None


def _call(subject: Subject, made: Made) -> Answer:
    return answer(subject, made.sample, made.make(), made.places)


def _others(
    subject: Subject, mine: Made, every: Sequence[Sample], device: torch.device
) -> Iterator[tuple[str, Made]]:
    """Calls that may disturb it: of other numbers, in other forms, of other shapes."""
    sample = mine.sample
    for other in (turned, scaled) if sample.inexact else ():
        made = Made(sample, mine.places, partial(_changed, other, sample, device))
        try:
            _call(subject, made)
        except Exception as error:
            refuse_own(error)
            continue  # it does not take such numbers
        yield OTHER, made
        break
    if subject.effort.name == "quick":
        return
    for form, make in other_forms(sample, device):
        yield f"a call {form}", Made(sample, mine.places, make)
    beside = [each for each in every if each is not sample and _shapes(each) == _shapes(sample)]
    apart = [each for each in every if _shapes(each) != _shapes(sample)]
    for each in (*beside[:1], *apart[:NEIGHBOURS]):
        with Overlooking():  # other properties tell what it raises there
            places = differentiated(subject, each).places
            yield f"a call of {each}", Made(each, places, partial(each.at, device=device))


def _shapes(sample: Sample) -> list[Any]:
    return [value.shape if isinstance(value, Tensor) else None for value in sample.flat]


def _changed(other: Callable[[list[Any]], list[Any]], sample: Sample, device: torch.device) -> list[Any]:
    return other(sample.at(device=device))


def _compared(stage: Stage, scenes: Sequence[Scene]) -> Findings:
    for scene in scenes:
        if scene is in_threads and (stage.subject.draws or seeds(stage.subject, stage.mine.sample)):
            yield Note("threads were left out: they draw from one random state, in any order")
            continue
        for heard in scene(stage):
            if heard.call not in stage.right:
                continue
            failure = _failure(stage, heard)
            if failure is not None:
                yield failure
                return  # the other scenes would say the same again
            yield from _rounding(stage, heard)


def _tensors(given: Answer) -> list[Tensor | None]:
    return [*given.results, *given.gradients]


def _names(stage: Stage, call: str) -> list[tuple[str, str, str]]:
    """For each tensor of an answer what it is called, in a sentence, and what computes it."""
    subject, made = stage.subject, stage.calls[call]
    labels, names = made.sample.labels, made.sample.names
    where = subject.runs_at(made.sample.flat)
    return [
        *((each.name, f"`{each.name}`", where) for each in subject.results(made.sample)),
        *(
            (labels[place], f"the gradient of `{labels[place]}`", rule_place(subject, names[place]))
            for place in made.places
        ),
    ]


def _failure(stage: Stage, heard: Heard) -> Failure | None:
    evidence = {"sample": str(stage.mine.sample)}
    kept = stage.memory.filled()
    by = f" It keeps something in {', '.join(kept)}." if kept else ""
    if kept:
        evidence["kept in"] = ", ".join(kept)
    if isinstance(heard.given, BaseException):
        error = heard.given
        message = (
            f"{_called(heard)} raises {type(error).__name__}: {first_line(error)}; alone it goes well.{by} "
            "What a call needs belongs on its own context, or among its arguments"
        )
        cause = "raises" if heard.alone else "stale-state"
        return Failure(NAME, None, cause, message, stage.subject.specification.where, evidence)
    right = _tensors(stage.right[heard.call])
    named_pairs = zip(_names(stage, heard.call), right, _tensors(heard.given), strict=False)
    for position, (named, one, other) in enumerate(named_pairs):
        if differ(one, other) and heard.mode is not None:
            return by_mode(NAME, stage, heard, position)
        if differ(one, other):
            name, what, where = named
            message = (
                f"{what} of {_called(heard)} is another one than alone: {what_differs(one, other)}.{by} What "
                "a call needs belongs on its own context, or among its arguments"
            )
            return Failure(NAME, name, "stale-state", message, where, evidence)
    return None


def _called(heard: Heard) -> str:
    return f"{heard.call}, made {heard.when},"


def _rounding(stage: Stage, heard: Heard) -> Findings:
    """A note where another mode has another rounding: another kernel may serve it."""
    if not heard.modes or isinstance(heard.given, BaseException):
        return
    right = _tensors(stage.right[heard.call])
    for named, one, other in zip(_names(stage, heard.call), right, _tensors(heard.given), strict=False):
        if one is not None and other is not None and not same_bits(one, other):
            yield Note(f"{named[1]} rounds otherwise {heard.when} than with gradients in one thread")


STATE = Property(NAME, "no state is carried between calls, modes and threads", run, varied=True)
