"""Determinism: two runs give the same bits, whatever memory held before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import CallValues, SampleRun, copies
from opsmith.checking.exceptions import Overlooking
from opsmith.checking.numerics.answer import Computation
from opsmith.checking.numerics.compare import (
    describe_difference,
    differ_beyond_rounding,
    exact_difference,
    same_bits,
    within_rounding,
)
from opsmith.checking.numerics.judge import judge
from opsmith.checking.property import Findings, Note, Property, each_sample
from opsmith.checking.report import Failure, Given
from opsmith.checking.samples.sample import Sample, is_inexact
from opsmith.checking.side_effects.canaries import fill_freed_memory, poison_new_memory
from opsmith.checking.side_effects.steady_runs import DIFFERS
from opsmith.checking.subject import Subject

NAME = "determinism"
WIDEST_DTYPES = (torch.float64, torch.complex128)
BYTES = (0xFF, 0x41)
"""Bytes left in used memory: nan in every floating dtype, and a number."""


def _sample(subject: Subject, sample: Sample) -> Findings:
    """Run forward and backward several times from the same random state, and in memory that was filled.

    Each run begins with the state that was there before the check: `state` tests what calls leave behind.
    """
    for run in SampleRun.of(subject, sample):
        runs = []
        for repeat in range(subject.effort.repeats):
            if repeat % 2:  # an extra call, so that state that alternates is not in step with the runs
                subject.call(sample, run.flat())
            runs.append(_values(run))
        dirtied, filled = [], []
        for byte in BYTES:
            dirtied.append(_filled_values(run, runs[0].tensors, byte))
            with poison_new_memory():
                filled.append(_values(run))
        results = len(subject.results(sample))
        names = run.names()
        twice = len(runs[0].results) > results  # without gradients enabled, and with them
        for at, named in enumerate([*names[: results * twice], *names]):
            name, by = named.name, "backward" if named.kind == "gradient" else "call"
            what = f"two {by}s give different {'gradients of ' * (by == 'backward')}`{name}`"
            columns = [[each.tensors[at] for each in values] for values in (runs, dirtied, filled)]
            yield from _look(run, at, at % results, (name, what, by, named.where), *columns)


def _values(run: SampleRun) -> CallValues:
    """Results without gradients enabled, and, where there are gradients, results and gradients with them."""
    run.subject.restore_outside()
    flat = run.flat()
    with torch.no_grad():
        alone = copies(run.subject.call(run.sample, flat))
    if not run.argnums:
        return CallValues(alone)
    found = run.values()
    return CallValues((*alone, *found.results), found.gradients)


def _look(
    run: SampleRun,
    place: int,
    at: int,
    named: tuple[str, str, str, str],
    plain: Sequence[Tensor | None],
    dirtied: Sequence[Tensor | None],
    filled: Sequence[Tensor | None],
) -> Findings:
    name, what, by, where = named
    evidence: dict[str, Any] = {"sample": str(run.sample)}
    reads = _reads_unwritten(plain, dirtied, filled)
    if reads is not None and (reads.shows_filling or _reads_again(run, place, poisoned=reads.poisoned)):
        message = (
            f"a {by} uses memory that is read before it is written (of `torch.empty`, `empty_like`, "
            f"`new_empty` or `numpy.empty`): {reads.words}. Make it with zeros, or write every element; "
            "`opsmith check --sanitize` names the line of a kernel in C++"
        )
        yield Failure(NAME, name, "nondeterministic", message, where, evidence)
        return
    evidence[DIFFERS] = "result" if by == "call" else "gradient"
    # A surrogate gradient is wrong on purpose, and may draw whether it passes.
    drawn = by != "call" and run.subject.specification.gradients.surrogate
    given: Given = "unpromised" if drawn else "usual"
    one, *others = (*plain, *dirtied)
    for other in others:
        if one is None or other is None:
            if one is not other:
                lost = f"{what}: {describe_difference(one, other)}"
                yield Failure(NAME, name, "nondeterministic", lost, where, evidence, given=given)
                return
            continue
        if same_bits(one, other):
            continue
        difference = exact_difference(other, one)
        if difference is None:
            continue
        if within_rounding(one, other):
            if run.subject.specification.rounds_alike:
                words = "a sum whose order changes from run to run does this; say so by `deterministic=False`"
                yield Note(f"{what}, by rounding alone: {words}")
            return
        if by == "call" and _within_bounds(run, at, (one, other)):
            continue
        seeded = " though both drew from the same random state" if run.subject.draws else ""
        message = (
            f"{what}{seeded}: {difference}; the second run is shown as wrong, the first as right. A global "
            "that changes, a clock, or threads that write in any order do this"
        )
        evidence |= difference.evidence()
        yield Failure(NAME, name, "nondeterministic", message, where, evidence, given=given)
        return


def _within_bounds(run: SampleRun, position: int, results: Sequence[Tensor]) -> bool:
    """Return True if an operator may round otherwise in each run, and rounding can bring each result there.

    A sum that cancels has few digits left, all of which depend on the order of its terms.
    """
    subject, sample = run.subject, run.sample
    if subject.specification.rounds_alike or not is_inexact(results[0]):
        return False
    if not subject.kind.has_reference:  # what runs differs from itself, so that no truth is to be had
        return _vanishes_with_precision(run, position, results)
    reference = partial(subject.reference, sample)
    right = Computation.of(reference, sample.at(), subject.generator(), has_truth=subject.has_truth)
    answer = right.at(sample.at(), results[0].dtype)[subject.visible_positions(sample)[position]]
    return not any(judge(result, answer).wrong for result in results)


RUNS = 8
"""Runs in another precision: an accident, such as a lost term, need not happen in two."""


def _vanishes_with_precision(run: SampleRun, position: int, results: Sequence[Tensor]) -> bool:
    """Return True if runs in a wider dtype differ by as much less as its rounding is finer.

    A lost term is as large in every precision.
    """
    subject, sample, dtype = run.subject, run.sample, results[0].dtype
    other = torch.float32 if dtype in WIDEST_DTYPES else torch.float64
    found: list[Tensor] = []
    with Overlooking(), torch.no_grad():
        for _ in range(RUNS):
            result = subject.call(sample, sample.at(other))[position]
            found += [] if result is None else [result]
    if not found or not is_inexact(found[0]) or torch.finfo(found[0].dtype).eps == torch.finfo(dtype).eps:
        return False
    spreads = {torch.finfo(group[0].dtype).eps: _spread(group) for group in (results, found)}
    fine, coarse = sorted(spreads)
    return spreads[fine] <= spreads[coarse] * math.sqrt(fine / coarse)


def _spread(results: Sequence[Tensor]) -> float:
    """The largest distance of a run's elements from those of the first; infinite where one is not finite."""
    stacked = torch.stack([each.detach() for each in results])
    if not bool(stacked.isfinite().all()):
        return math.inf
    return float((stacked - stacked[0]).abs().max()) if stacked.numel() else 0.0


@dataclass(frozen=True)
class ReadsUnwritten:
    """Evidence that memory is read before it is written.

    Args:
        words: Description of the difference.
        poisoned: True if torch filled new memory; False if freed memory was filled.
        shows_filling: True if the nan that it was filled with come out, as no draw does.
    """

    words: str
    poisoned: bool
    shows_filling: bool


def _reads_unwritten(
    plain: Sequence[Tensor | None], dirtied: Sequence[Tensor | None], filled: Sequence[Tensor | None]
) -> ReadsUnwritten | None:
    """Evidence that earlier contents of memory come out; None where there is none.

    Runs that differ anyway are not evidence: filling the memory must make them equal, or nan.
    """
    one, full = plain[0], filled[0]
    if one is None or full is None or one.shape != full.shape:
        return None
    steady = not any(other is not None and differ_beyond_rounding(one, other) for other in plain[1:])
    apart = all(each is not None and differ_beyond_rounding(one, each) for each in filled)
    inexact = is_inexact(full)
    more_nan = _has_more_nan(full, one)
    if apart and (steady or _alike_each_other(filled) or more_nan):
        filling = "nan" if inexact else "the largest number"
        words = f"where torch fills new memory with {filling}, {exact_difference(full, one)}"
        return ReadsUnwritten(words, poisoned=True, shows_filling=more_nan)
    for other in dirtied:
        if steady and other is not None and differ_beyond_rounding(one, other):
            words = f"where the memory was used for something else before, {exact_difference(other, one)}"
            return ReadsUnwritten(words, poisoned=False, shows_filling=_has_more_nan(other, one))
    return None


def _has_more_nan(filled: Tensor, plain: Tensor) -> bool:
    return is_inexact(filled) and bool((filled.isnan() & ~plain.isnan()).any())


REPEATS = 8
"""Number of pairs of runs that confirm it: what draws one of two values passes them once in 2**8 times."""


def _reads_again(run: SampleRun, place: int, *, poisoned: bool) -> bool:
    """True if each further run in filled memory differs from one beside it.

    Args:
        run: The sample.
        place: Position of the tensor among the values of a run.
        poisoned: As of `ReadsUnwritten`.
    """
    like = _values(run).tensors
    for _ in range(REPEATS):
        filled, other = (_filled_values(run, like, byte) for byte in BYTES)
        if poisoned:
            with poison_new_memory():
                filled = _values(run)
        if not differ_beyond_rounding(other.tensors[place], filled.tensors[place]):
            return False
    return True


def _filled_values(run: SampleRun, like: Sequence[Tensor | None], byte: int) -> CallValues:
    """Values of a run after memory of the sizes of its tensors was filled with a byte, and freed."""
    fill_freed_memory([*like, *run.sample.flat], byte)
    return _values(run)


def _alike_each_other(tensors: Sequence[Tensor | None]) -> bool:
    first = tensors[0]
    return all(
        first is not None and each is not None and not differ_beyond_rounding(first, each) for each in tensors
    )


DETERMINISM = Property(
    NAME,
    "running it twice gives the same, whatever memory held before",
    partial(each_sample, NAME, _sample),
    subset=True,
    first=True,
    compares_runs=False,
    about_gradients=False,
    sends_gradients=True,
)
