"""State: a call does not depend on other calls, on modes, or on threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import differentiated
from opsmith.checking.exceptions import Overlooking, Raised, attempt
from opsmith.checking.properties.behaviour.randomness import seeds
from opsmith.checking.property import Findings, Note, Property
from opsmith.checking.report import Failure
from opsmith.checking.run import CallValues, Run, copies, differing, each_run
from opsmith.checking.samples.batches import replicas
from opsmith.checking.samples.perturb import other_forms, reversed_numbers, scaled
from opsmith.checking.samples.sample import Sample
from opsmith.checking.side_effects.interleavings import (
    FEW_INTERLEAVINGS,
    INTERLEAVINGS,
    OTHER_CALL,
    THIS_CALL,
    InterleavedAnswer,
    InterleavedCalls,
    Interleaving,
    in_threads,
)
from opsmith.checking.side_effects.outside_state import HiddenState, OutsideState
from opsmith.checking.subject import Subject
from opsmith.judging.compare import describe_difference, differ_beyond_rounding, same_bits

NAME = "state"


def run(subject: Subject) -> Findings:
    """Make each sample's call alone, then between other calls, and compare the results."""
    own = [sample for sample in subject.samples if not sample.origin]
    most = subject.effort.samples  # hidden state shows on every sample
    few = replace(subject, samples=tuple(own[:most]))
    yield from each_run(NAME, partial(_check, every=subject.samples), few, devices=True)
    if len(own) > most:
        few_words = "only the first was" if most == 1 else f"the first {most} were"
        yield Note(f"of {len(own)} samples, {few_words} checked")


def _check(run: Run, every: Sequence[Sample]) -> Findings:
    defaults = [each.default for each in run.subject.specification.schema.arguments]
    memory = HiddenState.of(run.subject.functions, run.values, defaults)
    with memory.away():
        unsteady = _unsteady(run, memory)
        if unsteady is not None:
            yield unsteady
            return
        calls = InterleavedCalls(memory, run)
        _add_others(calls, every)
        first = run.sample is run.subject.samples[0]
        yield from _compared(calls, INTERLEAVINGS if first else FEW_INTERLEAVINGS)


def _unsteady(run: Run, memory: HiddenState) -> Failure | None:
    """The failure if two runs of the same call differ, though hidden state was reset."""

    def begin_anew() -> None:
        run.subject.restore_outside()
        memory.clear()

    difference = _difference(run, memory.clear)
    if difference is None:
        return None
    words = (
        f"the same call gives a different result the second time: {difference}; the first result counts "
        "as right"
    )
    if _difference(run, begin_anew) is not None:
        return run.failure(None, "nondeterministic", words)
    before = OutsideState.of(run.subject.functions)
    run.values()
    changed = ", ".join(name for name, _ in before.changes())
    by = f"; each call changes {changed}" if changed else ""
    message = f"{words}{by}. If both calls begin with the same state, the results agree. {KEPT_HINT}"
    return run.failure(None, "stale-state", message)


def _difference(run: Run, begin: Callable[[], None]) -> str | None:
    """Describe the difference between two runs of the same call; None if there is none."""
    runs = []
    for _ in range(2):
        begin()
        runs.append(run.values().tensors)
    return next((describe_difference(runs[0][at], runs[1][at]) for at in differing(*runs)), None)


def _add_others(calls: InterleavedCalls, every: Sequence[Sample]) -> None:
    """Add calls that may disturb the tested call: with different numbers, layouts and shapes."""
    run, subject, sample = calls.run, calls.run.subject, calls.run.sample
    for change in (reversed_numbers, scaled) if sample.inexact else ():
        if calls.add(OTHER_CALL, replace(run, changed=change)):
            break  # otherwise it does not take such numbers
    if not subject.effort.neighbours:
        return
    for form, make in other_forms(sample, run.device):
        calls.add(f"a call {form}", replace(run, changed=make))
    beside = [each for each in every if each is not sample and _shapes(each) == _shapes(sample)]
    apart = [each for each in every if _shapes(each) != _shapes(sample)]
    for each in (*beside[:1], *apart[: subject.effort.neighbours]):
        with Overlooking():  # other properties report its exceptions there
            argnums = differentiated(subject, each).argnums
            calls.add(f"a call on {each}", Run(subject, each, NAME, run.device, by=argnums))


def _shapes(sample: Sample) -> list[Any]:
    return [value.shape if isinstance(value, Tensor) else None for value in sample.flat]


def _compared(calls: InterleavedCalls, interleavings: Sequence[Interleaving]) -> Findings:
    for interleaving in interleavings:
        if interleaving is in_threads and _draws(calls):
            yield Note("calls in threads were left out: the threads draw from one random state, in any order")
            continue
        for interleaved in interleaving(calls):
            for finding in _findings(calls, interleaved) if interleaved.call in calls.right else ():
                yield finding
                if isinstance(finding, Failure):
                    return  # the other interleavings would report the same fault


def _draws(calls: InterleavedCalls) -> bool:
    """True if a call draws from a global random state, or sets it."""
    subject = calls.run.subject
    undeclared = subject.steady is not None and subject.steady.draws
    return undeclared or subject.draws or seeds(subject, calls.run.sample)


KEPT_HINT = "Keep the data of a call on its own context, or take it as an argument"

MODE_HINT = (
    "No other call came before: the mode is the cause. A forward that computes gradients needs "
    "`torch.enable_grad()`, and clones that are made under `torch.inference_mode(False)`"
)

CALLER_HINT = (
    "The operator looks at its caller: at frames, `sys.modules`, `sys.argv` or the environment. "
    "Take the value as an argument"
)


def _findings(calls: InterleavedCalls, interleaved: InterleavedAnswer) -> Findings:
    """Compare results with the call's alone; note different rounding in a mode with a different kernel."""
    run, given = calls.run, interleaved.given
    called = f"{interleaved.call}, made {interleaved.when},"
    stale, alone, hint = "stale-state", "alone", KEPT_HINT
    if interleaved.by_script:
        stale, alone, hint = "looks-at-caller", "in this check", CALLER_HINT
    holders = ", ".join([] if interleaved.by_script else calls.hidden_state.filled())
    by = f" The operator keeps something in {holders}." if holders else ""
    evidence = {"kept in": holders} if holders else {}
    if isinstance(given, Raised):
        hint = MODE_HINT if interleaved.alone else hint
        message = f"{called} raises {given}; the same call {alone} succeeds.{by} {hint}"
        yield run.failure(None, "raises" if interleaved.alone else stale, message, evidence=evidence)
        return
    names, right = calls.runs[interleaved.call].names(), calls.right[interleaved.call].tensors
    held_to_bits = interleaved.modes and run.subject.specification.rounds_alike
    for position, (named, one, other) in enumerate(zip(names, right, given.tensors, strict=False)):
        differs = differ_beyond_rounding(one, other)
        if differs and interleaved.mode is not None:
            yield by_mode(calls, interleaved, position)
        elif differs:
            difference = describe_difference(one, other)
            message = f"{named} of {called} differs from the same call {alone}: {difference}.{by} {hint}"
            yield run.failure(named.name, stale, message, named.where, evidence)
        elif held_to_bits and one is not None and other is not None and not same_bits(one, other):
            yield Note(f"{named} rounds differently {interleaved.when} than with gradients in one thread")


BESIDE_GRADIENTS = "The result with gradients counts as right"


def by_mode(calls: InterleavedCalls, interleaved: InterleavedAnswer, position: int) -> Failure:
    """The failure for a result that differs because of a mode.

    If the result also changes with gradients enabled but no input that requires one, this is the cause, not
    the mode. Otherwise, if the reference does not change, a kernel or a different part is the cause.
    """
    assert isinstance(interleaved.given, CallValues)
    run, sample = calls.run, calls.run.sample
    right, given = calls.right[THIS_CALL].results[position], interleaved.given.results[position]
    name = run.subject.results(sample)[position].name
    fail = partial(
        run.failure,
        where=run.subject.runs_at(run.flat()),
        evidence={"mode": interleaved.when.removeprefix("under ").strip("`")},
    )
    plain = _requiring(calls, (), position)
    if plain is not None and differ_beyond_rounding(right, plain):
        needed = [
            sample.labels[at]
            for at in run.argnums
            if not differ_beyond_rounding(right, _requiring(calls, (at,), position))
        ]
        one = needed[0] if len(needed) == 1 else None
        which = f"where `{one}` requires no gradient" if one else "where no input requires a gradient"
        message = (
            f"`{name}` differs {which}, with gradients enabled as well as {interleaved.when}: "
            f"{describe_difference(right, plain)}. {BESIDE_GRADIENTS}: the results of a call must not depend "
            f"on which inputs require a gradient"
        )
        return fail(one or name, "input-needs-grad", message)
    changed = f"`{name}` of a call that is made {interleaved.when} differs"
    difference = describe_difference(right, given)
    off = f"{difference}. {BESIDE_GRADIENTS}; it makes no difference which inputs require a gradient"
    if _reference_stays(calls, interleaved, position):
        message = (
            f"{changed}, but the reference's result does not: {off}. The implementation depends on the mode"
        )
        return fail(name, "kernel-mismatch", message)
    return fail(name, "unknown", f"{changed}: {off}, so the mode is the cause")


def _requiring(calls: InterleavedCalls, argnums: tuple[int, ...], position: int) -> Tensor | None:
    """The result with gradients enabled if only these inputs require a gradient; None if the call raises."""
    run = replace(calls.run, by=argnums)
    calls.hidden_state.clear()
    results = attempt(lambda: copies(run.call().results))
    return None if isinstance(results, Raised) else results[position]


def result_by_need(
    subject: Subject, sample: Sample, argnums: Sequence[int], dtype: torch.dtype, device: torch.device
) -> str | None:
    """Describe a result that changes, in every run, if some inputs require a gradient."""
    (needed, again), (plain, once_more) = (
        [copies(Run(subject, sample, NAME, device, dtype, tuple(some)).call().results) for _ in range(2)]
        for some in (argnums, ())
    )
    unsteady = {*differing(needed, again), *differing(plain, once_more)}
    for at in differing(plain, needed):
        if at not in unsteady:
            name = subject.results(sample)[at].name
            return f"`{name}` changes: {describe_difference(plain[at], needed[at])}"
    return None


def _reference_stays(calls: InterleavedCalls, interleaved: InterleavedAnswer, position: int) -> bool:
    """True if there is a separate reference, and the mode does not change its result."""
    subject, made = calls.run.subject, calls.run
    if subject.apply is not None or subject.specification.opaque or interleaved.mode is None:
        return False
    plain = subject.plain(made.sample)
    with interleaved.mode():
        inside = plain(replicas(made.flat()))[position].clone()
    return not differ_beyond_rounding(plain(replicas(made.flat()))[position].detach(), inside)


STATE = Property(
    NAME, "no state is carried between calls, modes and threads", run, inputs="every", traits=("first",)
)
