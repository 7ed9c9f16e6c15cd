"""Determinism: two runs give the same bits, for any earlier contents of memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from opsmith.checking.exceptions import Overlooking
from opsmith.checking.property import Findings, Note, Property
from opsmith.checking.report import Given
from opsmith.checking.run import Run, TensorName, copies, each_run
from opsmith.checking.side_effects.canaries import BYTES, fill_freed_memory, poison_new_memory
from opsmith.checking.side_effects.steady_runs import DIFFERS
from opsmith.checking.ways import Outputs
from opsmith.judging.answer import Computation
from opsmith.judging.compare import (
    differ_beyond_rounding,
    exact_difference,
    form_difference,
    within_rounding,
)
from opsmith.judging.judge import judge
from opsmith.judging.tensors import is_inexact

NAME = "determinism"
WIDEST_DTYPES = (torch.float64, torch.complex128)


def _check(run: Run) -> Findings:
    """Run forward and backward several times from the same random state, also in memory that was filled.

    Each run begins with the state before the check; the property `state` tests the effects of earlier calls.
    """
    plain = []
    for repeat in range(run.subject.effort.repeats):
        if repeat % 2:  # an extra call, so that alternating state is out of step with the runs
            run.subject.call(run.sample, run.flat())
        plain.append(_values(run))
    dirtied = [_values_in(run, plain[0], byte) for byte in BYTES]
    filled = [_values_in(run, plain[0], None) for _ in BYTES]
    names = run.names()
    results = names[: len(run.subject.results(run.sample))] if len(plain[0]) > len(names) else []
    for place, named in enumerate([*results, *names]):  # without gradients enabled, and with them
        columns = [[tensors[place] for tensors in runs] for runs in (plain, dirtied, filled)]
        yield from _look(run, named, place, *columns)


def _values(run: Run) -> Outputs:
    """Results with gradients disabled; if there are any, also results and gradients with them enabled."""
    run.subject.restore_outside()
    flat = run.flat()
    with torch.no_grad():
        alone = copies(run.subject.call(run.sample, flat))
    return (*alone, *run.values().tensors) if run.argnums else alone


def _values_in(run: Run, like: Outputs, byte: int | None) -> Outputs:
    """Values of a run, after memory blocks of its tensors' sizes were filled with a byte and freed.

    If no byte is given, torch fills new memory instead.
    """
    if byte is None:
        with poison_new_memory():
            return _values(run)
    fill_freed_memory([*like, *run.sample.flat], byte)
    return _values(run)


def _look(
    run: Run, named: TensorName, place: int, plain: Outputs, dirtied: Outputs, filled: Outputs
) -> Findings:
    """Compare an output of several runs: plain ones, and runs in filled used memory and in new memory."""
    by = "backward" if named.kind == "gradient" else "call"
    what = f"two {by}s give different {'gradients of ' * (by == 'backward')}`{named.name}`"
    reads = _reads_unwritten(run, place, plain, dirtied, filled)
    if reads is not None:
        message = (
            f"a {by} reads memory that it has not written (memory of `torch.empty`, `empty_like`, "
            f"`new_empty` or `numpy.empty`): {reads}. Create the tensor with zeros, or write every "
            "element; `opsmith check --sanitize` names the line of a kernel in C++"
        )
        yield run.failure(named.name, "nondeterministic", message, named.where)
        return
    one, *others = (*plain, *dirtied)
    for other in others:
        difference = form_difference(other, one)
        if difference is None and one is not None and other is not None:
            difference = exact_difference(other, one)
            if difference is not None and within_rounding(one, other):
                if run.subject.specification.rounds_alike:
                    words = "a sum whose order changes from run to run may cause the difference; declare"
                    yield Note(f"{what}, but only rounding differs: {words} `deterministic=False`")
                return
            if difference is not None and by == "call" and _within_bounds(run, place, (one, other)):
                continue
        if difference is None:
            continue
        seeded = " although both runs drew from the same random state" if run.subject.draws else ""
        message = (
            f"{what}{seeded}: {difference}; the first run counts as right. Possible causes are a "
            "global variable that changes, a clock, or threads that write in any order"
        )
        evidence = {DIFFERS: "result" if by == "call" else "gradient", **difference.evidence()}
        # A surrogate gradient is wrong on purpose, and random numbers may decide if it passes.
        drawn = by != "call" and run.subject.specification.gradients.surrogate
        given: Given = "unpromised" if drawn else "usual"
        yield run.failure(named.name, "nondeterministic", message, named.where, evidence, given=given)
        return


def _reads_unwritten(run: Run, place: int, plain: Outputs, dirtied: Outputs, filled: Outputs) -> str | None:
    """Text on earlier contents of memory that appear in an output; None if there are none.

    Runs that differ in any case prove nothing: filling the memory must make them equal, or nan.
    """
    one, full = plain[0], filled[0]
    if one is None or full is None or one.shape != full.shape:
        return None
    differ = partial(differ_beyond_rounding, one)
    steady = not any(other is not None and differ(other) for other in plain[1:])
    alike = not any(differ_beyond_rounding(full, each) for each in filled)
    reads: list[tuple[Tensor, int | None, str]] = []
    if all(map(differ, filled)) and (steady or alike or _has_more_nan(full, one)):
        filling = "nan" if is_inexact(full) else "the largest number"
        reads.append((full, None, f"torch fills new memory with {filling}"))
    dirty = (each for each in dirtied if steady and each is not None and differ(each))
    reads += [(each, BYTES[0], "the memory was used for something else before") for each in dirty][:1]
    for read, byte, where in reads:  # torch does not fill NumPy's memory
        if _has_more_nan(read, one) or _reads_again(run, place, byte):
            return f"where {where}, {exact_difference(read, one)}"
    return None


def _has_more_nan(filled: Tensor, plain: Tensor) -> bool:
    """True if nan from the filled memory appear in the output, which random numbers do not explain."""
    return is_inexact(filled) and bool((filled.isnan() & ~plain.isnan()).any())


REPEATS = 8
"""Number of pairs of runs for confirmation: a random choice of two values passes them once in 2**8 times."""


def _reads_again(run: Run, place: int, byte: int | None) -> bool:
    """True if each further run in filled memory differs from a run in memory with different contents."""
    like = _values(run)
    others = (_values_in(run, like, BYTES[1])[place] for _ in range(REPEATS))
    return all(differ_beyond_rounding(other, _values_in(run, like, byte)[place]) for other in others)


def _within_bounds(run: Run, place: int, results: Sequence[Tensor]) -> bool:
    """Return True if an operator may round differently in each run, and rounding explains each result.

    If the terms of a sum cancel, few digits remain, which all depend on the order of the terms.
    """
    subject, sample = run.subject, run.sample
    position = place % len(subject.results(sample))
    if subject.specification.rounds_alike or not is_inexact(results[0]):
        return False
    if not subject.kind.has_reference:  # runs of the code differ, so that no right result is known
        return _vanishes_with_precision(run, position, results)
    reference = partial(subject.reference, sample)
    right = Computation.of(reference, sample.at(), subject.generator(), has_truth=subject.has_truth)
    answer = right.at(sample.at(), results[0].dtype)[subject.visible_positions(sample)[position]]
    return not any(judge(result, answer).wrong for result in results)


RUNS = 8
"""Number of runs in a different precision: a rare fault, such as a lost term, may not occur in two runs."""


def _vanishes_with_precision(run: Run, position: int, results: Sequence[Tensor]) -> bool:
    """Return True if the differences between runs shrink in a wider dtype in proportion to its rounding.

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
    """The largest difference between a run and the first run; infinite if an element is not finite."""
    stacked = torch.stack([each.detach() for each in results])
    if not bool(stacked.isfinite().all()):
        return math.inf
    return float((stacked - stacked[0]).abs().max()) if stacked.numel() else 0.0


DETERMINISM = Property(
    NAME,
    "two runs give the same results, whatever the memory held before",
    partial(each_run, NAME, _check, devices=True),
    inputs="few",
    traits=("first", "compares-no-runs", "about-results", "sends-gradients"),
)
