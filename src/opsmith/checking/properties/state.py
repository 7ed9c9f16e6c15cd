"""No state is carried from call to call: what one gives depends on no other, on no mode and no thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.agreement import differ, what_differs
from opsmith.checking.alive import Answer, answer
from opsmith.checking.bits import same_bits
from opsmith.checking.differentiated import differentiated, rule_place
from opsmith.checking.forgetting import Memory
from opsmith.checking.other_values import other_forms, scaled, turned
from opsmith.checking.property import Findings, Note, Property, each_sample, first_line
from opsmith.checking.report import Failure
from opsmith.checking.sample import Sample
from opsmith.checking.scenes import MINE, OTHER, SCENES, Heard, Stage, in_threads
from opsmith.checking.subject import Subject

NAME = "state"


def run(subject: Subject) -> Findings:
    """Make each sample's call alone, and then among others, and compare what it gives."""
    yield from each_sample(NAME, subject, _sample)


def _sample(subject: Subject, sample: Sample) -> Findings:
    places = differentiated(subject, sample).places
    for device in subject.devices:
        first, second = (_call(subject, sample, places, device) for _ in range(2))
        if any(differ(one, other) for one, other in zip(_tensors(first), _tensors(second), strict=True)):
            yield Note(f"{sample} was left out: two runs of it differ, as `determinism` says")
            continue
        memory = Memory.of(subject, partial(_call, subject, sample, places, device))
        with memory.away():
            yield from _compared(_stage(subject, sample, places, memory, device))


def _call(subject: Subject, sample: Sample, places: tuple[int, ...], device: torch.device) -> Answer:
    return answer(subject, sample, sample.at(device=device), places)


def _stage(
    subject: Subject, sample: Sample, places: tuple[int, ...], memory: Memory, device: torch.device
) -> Stage:
    calls = {MINE: lambda: sample.at(device=device)}
    if sample.inexact:
        for other in (turned, scaled):
            try:
                answer(subject, sample, other(sample.at(device=device)), places)
            except Exception:  # it does not take such numbers
                continue
            calls[OTHER] = partial(_made, other, sample, device)
            break
    if subject.effort.name != "quick":
        calls.update((f"a call {form}", make) for form, make in other_forms(sample, device))
    stage = Stage(subject, sample, places, memory, calls)
    stage.prepare()
    return stage


def _made(other: Callable[[list[Any]], list[Any]], sample: Sample, device: torch.device) -> list[Any]:
    return other(sample.at(device=device))


def _compared(stage: Stage) -> Findings:
    for scene in SCENES:
        if scene is in_threads and stage.subject.draws:
            yield Note("threads were left out: they draw from one random state, in any order")
            continue
        for heard in _heard(scene(stage), stage):
            failure = _failure(stage, heard)
            if failure is not None:
                yield failure
                return  # the other scenes would say the same again
            yield from _rounding(stage, heard)


def _heard(scene: Iterator[Heard], stage: Stage) -> Iterator[Heard]:
    for heard in scene:
        if heard.call in stage.right:
            yield heard


def _tensors(given: Answer) -> list[Tensor | None]:
    return [*given.results, *given.gradients]


def _names(stage: Stage) -> list[tuple[str, str, str]]:
    """For each tensor of an answer what it is called, in a sentence, and what computes it."""
    subject, sample = stage.subject, stage.sample
    where = subject.runs_at(sample.flat)
    results = [(each.name, f"`{each.name}`", where) for each in subject.results(sample)]
    gradients = [
        (
            sample.labels[place],
            f"the gradient of `{sample.labels[place]}`",
            rule_place(subject, sample.names[place]),
        )
        for place in stage.places
    ]
    return [*results, *gradients]


def _failure(stage: Stage, heard: Heard) -> Failure | None:
    right = stage.right[heard.call]
    evidence = {"sample": str(stage.sample)}
    kept = stage.memory.filled()
    by = f" It keeps something in {', '.join(kept)}." if kept else ""
    if kept:
        evidence["kept in"] = ", ".join(kept)
    if isinstance(heard.given, Exception):
        error = heard.given
        alone = heard.modes and heard.when.startswith("under") and "after" not in heard.when
        message = (
            f"{_called(heard)} raises {type(error).__name__}: {first_line(error)}; alone it goes well.{by} "
            "What a call needs belongs on its own context, or among its arguments"
        )
        cause = "raises" if alone else "stale-state"
        return Failure(NAME, None, cause, message, stage.subject.specification.where, evidence)
    for (name, what, where), one, other in zip(
        _names(stage), _tensors(right), _tensors(heard.given), strict=False
    ):
        if differ(one, other):
            message = (
                f"{what} of {_called(heard)} is another one than alone: {what_differs(one, other)}.{by} What "
                "a call needs belongs on its own context, or among its arguments"
            )
            return Failure(NAME, name, "stale-state", message, where, evidence)
    return None


def _called(heard: Heard) -> str:
    return f"{heard.call}, made {heard.when}," if heard.when != "again" else f"{heard.call}, made again,"


def _rounding(stage: Stage, heard: Heard) -> Findings:
    if not heard.modes or isinstance(heard.given, Exception):
        return
    right = stage.right[heard.call]
    for (_, what, _), one, other in zip(_names(stage), _tensors(right), _tensors(heard.given), strict=False):
        if one is not None and other is not None and not same_bits(one, other):
            yield Note(f"{what} rounds otherwise {heard.when} than with gradients in one thread")


STATE = Property(NAME, "no state is carried between calls, modes and threads", run)
