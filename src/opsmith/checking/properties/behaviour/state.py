"""No state is carried from call to call: what one gives depends on no other, on no mode and no thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import Answer, alive, answer, copies
from opsmith.checking.exceptions import Overlooking, refuse_own
from opsmith.checking.numerics.compare import differ, same_bits, what_differs
from opsmith.checking.properties.behaviour.randomness import seeds
from opsmith.checking.properties.numeric.differentiable import differentiated, rule_place
from opsmith.checking.property import Findings, Note, Property, each_sample, first_line
from opsmith.checking.report import Failure
from opsmith.checking.samples.perturb import other_forms, scaled, turned
from opsmith.checking.samples.sample import Sample, replica
from opsmith.checking.side_effects.hidden_state import Memory
from opsmith.checking.side_effects.interleavings import (
    MINE,
    OTHER,
    SCENES,
    Heard,
    Made,
    Scene,
    Stage,
    in_threads,
)
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


BESIDE_GRADIENTS = "That with gradients is taken as right"


def by_mode(check: str, stage: Stage, heard: Heard, position: int) -> Failure:
    """The failure for a result that a mode alone has changed.

    It is not the mode that changes it, but that no input requires a gradient, where it changes with gradients
    enabled as well. Else it is a kernel's or another part's own, where the reference stays as it is.

    Args:
        check: Name of the property.
        stage: The calls.
        heard: The call in that mode.
        position: Which visible result is another one.
    """
    assert isinstance(heard.given, Answer)
    subject, sample = stage.subject, stage.mine.sample
    right = stage.right[MINE].results[position]
    given = heard.given.results[position]
    name = subject.results(sample)[position].name
    evidence = {"sample": str(sample), "mode": heard.when.removeprefix("under ").strip("`")}
    where = subject.runs_at(stage.mine.make())
    plain = _requiring(stage, (), position)
    if plain is not None and differ(right, plain):
        needed = [at for at in stage.mine.places if not differ(right, _requiring(stage, (at,), position))]
        labels = " and ".join(f"`{sample.labels[at]}`" for at in needed)
        which = f"where {labels} requires no gradient" if len(needed) == 1 else "where no input requires one"
        message = (
            f"`{name}` is another one {which}, with gradients enabled as well as {heard.when}: "
            f"{what_differs(right, plain)}. {BESIDE_GRADIENTS}: what a call returns must not depend on what "
            "requires a gradient"
        )
        label = sample.labels[needed[0]] if len(needed) == 1 else name
        return Failure(check, label, "input-needs-grad", message, where, evidence)
    changed = f"`{name}` of a call that is made {heard.when} is another one"
    off = f"{what_differs(right, given)}. {BESIDE_GRADIENTS}; inputs that require none make no difference"
    if _reference_stays(stage, heard, position):
        message = f"{changed}, and the reference's is not: {off}. What computes it asks for the mode"
        return Failure(check, name, "kernel-mismatch", message, where, evidence)
    return Failure(check, name, "unknown", f"{changed}: {off}, so that the mode decides", where, evidence)


def _requiring(stage: Stage, places: tuple[int, ...], position: int) -> Tensor | None:
    """The result where these inputs alone require a gradient, with gradients enabled; None if it raises."""
    stage.memory.forget()
    made = stage.mine

    def run() -> Answer:
        return Answer(copies(alive(stage.subject, made.sample, made.make(), places).results))

    heard = stage.heard(MINE, "", run)
    return None if isinstance(heard.given, BaseException) else heard.given.results[position]


def result_by_need(
    subject: Subject, sample: Sample, places: Sequence[int], dtype: torch.dtype, device: torch.device
) -> str | None:
    """In what a result is another one where inputs require a gradient, each time that it is computed.

    Args:
        subject: What is under check.
        sample: The sample.
        places: The inputs that require a gradient, or do not.
        dtype: dtype of floating inputs.
        device: Where they lie.
    """
    needed, plain = (
        [copies(alive(subject, sample, sample.at(dtype, device), some).results) for _ in range(2)]
        for some in (places, ())
    )
    for described, *each in zip(subject.results(sample), *needed, *plain, strict=False):
        with_one, again, without, once_more = each
        if differ(without, with_one) and not differ(with_one, again) and not differ(without, once_more):
            return f"`{described.name}` is another one then: {what_differs(without, with_one)}"
    return None


def _reference_stays(stage: Stage, heard: Heard, position: int) -> bool:
    """Whether there is a reference apart from what ran, and the mode does not change its result."""
    subject, made = stage.subject, stage.mine
    if subject.apply is not None or subject.specification.opaque or heard.mode is None:
        return False
    plain = subject.plain(made.sample)
    with heard.mode():
        inside = plain([replica(value) for value in made.make()])[position].clone()
    return not differ(plain([replica(value) for value in made.make()])[position].detach(), inside)
