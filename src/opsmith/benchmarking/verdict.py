"""Compare a benchmark with an earlier one: find rows that became slower by more than the noise of both.

A row is slower only if all these conditions are met by more than `tolerance`:

- The quartiles do not overlap: the new lower quartile is above the earlier upper quartile.
- The new minimum is larger, too: noise only adds time, and even a disturbed machine has undisturbed moments.
- Both are true with and without the machine's drift. The drift is the change of the controls: a copy, a
  matrix product, the reference and the compiled reference, if its source is the same. All controls are timed
  in the same rounds as the operator, in both runs. A disturbance affects each differently, so the largest
  change of a control is allowed for.
- Both are true after three times the scatter is subtracted. Two runs differ in memory addresses and cores.
  The scatter measures this on the controls: it is the median distance of their ratios from the median of each
  control, times 1.4826 (the standard deviation if the distances are normal: F. R. Hampel, "The influence
  curve and its role in robust estimation", 1974).

Each row states the smallest slowdown that would have counted. Only the rows of the operator are judged:
baselines and the compiled reference are reported.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from opsmith import errors
from opsmith.benchmarking.result import CONTROLS, Benchmark, BenchmarkCase
from opsmith.benchmarking.timing import spread
from opsmith.core.call_arguments import shown
from opsmith.display import short_repr, titled_repr

TOLERANCE = 0.1
"""Smallest slowdown, as a fraction, that counts as slower."""

NOISY = 1.5
"""Detectable ratio from which on the verdict reports much noise."""

SCATTERS = 3
"""Multiple of the scatter that is allowed for."""
CENTRED = 3
"""Minimum number of ratios of a contender whose median is subtracted for the scatter."""

STRICT = ("machine", "processor", "devices", "torch")
"""Keys of the environment that must agree for times to be comparable."""


@dataclass(frozen=True)
class TimeChange:
    """Change of one row.

    Args:
        case: Label of the size.
        contender, direction: The contender and the direction.
        before, now: Medians in seconds.
        ratio: Ratio of the medians.
        low, high: Bounds of the ratio after allowing for spreads, drift and scatter.
        drift: Smallest and largest slowdown of the machine, as its controls show.
        detectable: The smallest slowdown that would have counted.
        kind: `slower`, `faster`, `same`, or `unclear`: a change that noise may explain.
        judged: True for a row of the operator.
    """

    __repr__ = short_repr

    case: str
    contender: str
    direction: str
    before: float
    now: float
    ratio: float
    low: float
    high: float
    drift: tuple[float, float]
    detectable: float
    kind: str
    judged: bool = True

    def __str__(self) -> str:
        return (
            f"{self.contender} {self.direction} at {self.case}: {self.ratio:.2f} times as long "
            f"({self.low:.2f} to {self.high:.2f}): {self.kind}"
        )


@dataclass(frozen=True)
class Verdict:
    """Comparison of a benchmark with an earlier one; `print` shows it.

    Args:
        operator: The operator's name.
        differences: Differences between the two runs that make their times incomparable. changes: Change of
            each row that is in both runs. missing: Rows that are in one run only.
    """

    operator: str
    differences: tuple[str, ...]
    changes: tuple[TimeChange, ...]
    missing: tuple[str, ...]

    @property
    def comparable(self) -> bool:
        """True if the runs are comparable, and have rows in common."""
        return not self.differences and any(change.judged for change in self.changes)

    @property
    def slower(self) -> tuple[TimeChange, ...]:
        """Rows of the operator that became slower; empty if the runs are not comparable."""
        if not self.comparable:
            return ()
        return tuple(change for change in self.changes if change.judged and change.kind == "slower")

    @property
    def passed(self) -> bool:
        """True if the runs are comparable, and no row became slower."""
        return self.comparable and not self.slower

    def __str__(self) -> str:
        judged = [change for change in self.changes if change.judged]
        if self.differences:
            lines = [f"{self.operator}: NOT COMPARABLE: {'; '.join(self.differences)}"]
        elif not judged:
            lines = [f"{self.operator}: NOT COMPARABLE: no row of the operator is in both runs"]
        elif self.slower:
            lines = [f"{self.operator}: SLOWER in {len(self.slower)} of {len(judged)} rows"]
        else:
            most = max(change.detectable for change in judged)
            seen = f"a slowdown by a factor of {most:.2f} would have been seen in every row"
            lines = [f"{self.operator}: not slower; {seen}"]
            if most > NOISY:
                seen = f"a slowdown by a factor of less than {most:.2f} might not have been seen"
                lines = [f"{self.operator}: no slowdown seen, but the noise is large: {seen}"]
        shown_changes = self.slower or [change for change in judged if change.kind != "same"]
        lines += [f"  {change}" for change in shown_changes]
        if not self.differences and any(change.kind == "unclear" for change in judged):
            lines.append("  unclear: noise may explain it; measure both again without other programs")
        lines += [f"  only in one of the runs: {each}" for each in self.missing]
        return "\n".join(lines)

    __repr__ = titled_repr(lambda verdict: str(verdict).partition("\n")[0])

    def to_dict(self) -> dict[str, Any]:
        """The verdict in JSON's types."""
        return {**asdict(self), "comparable": self.comparable, "passed": self.passed}


def verdict(now: Benchmark, earlier: Benchmark, tolerance: float = TOLERANCE) -> Verdict:
    """Compare a benchmark with an earlier one.

    Args:
        now: The new benchmark.
        earlier: The earlier benchmark.
        tolerance: Smallest slowdown that counts, as a fraction: 0.1 for a tenth.

    Raises:
        UsageError: If they are of different operators, or `tolerance` is not a fraction.
    """
    _refuse(now, earlier, tolerance)
    before = _keyed(earlier.cases)
    pairs: list[tuple[BenchmarkCase, BenchmarkCase]] = []
    missing = []
    for key, case in _keyed(now.cases).items():
        other = before.pop(key, None)
        if other is None:
            missing.append(_named(case))
            continue
        pairs.append((case, other))
        lost = {each.contender for each in other.timings} ^ {each.contender for each in case.timings}
        missing += [f"{name} at {_named(case)}" for name in sorted(lost)]
    missing += [_named(case) for case in before.values()]
    scatter = _scatter(pairs)
    changes = [change for case, other in pairs for change in _changes(case, other, scatter, tolerance)]
    return Verdict(now.operator, tuple(_incomparable(now, earlier)), tuple(changes), tuple(missing))


def _keyed(cases: Iterable[BenchmarkCase]) -> dict[tuple[Any, int], BenchmarkCase]:
    """Map cases by their keys; cases with the same key are distinguished by their order."""
    seen: Counter[Any] = Counter()
    found = {}
    for case in cases:
        found[case.key, seen[case.key]] = case
        seen[case.key] += 1
    return found


def _refuse(now: Benchmark, earlier: Any, tolerance: Any) -> None:
    if not isinstance(earlier, Benchmark):
        raise errors.UsageError(
            "a benchmark is compared with a benchmark",
            operator=now.operator,
            argument="earlier",
            expected="a Benchmark",
            got=shown(earlier),
            hint="read it first: `Benchmark.from_json(text)`",
        )
    if now.operator != earlier.operator:
        raise errors.UsageError(
            "the two benchmarks are of different operators",
            operator=now.operator,
            expected=f"an earlier benchmark of `{now.operator}`",
            got=f"one of `{earlier.operator}`",
            hint="compare benchmarks of the same operator",
        )
    refuse_tolerance(tolerance)


def refuse_tolerance(tolerance: Any) -> None:
    """Raise an error for an invalid tolerance.

    Raises:
        UsageError: If it is not a finite number of at least 0.
    """
    fits = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    if not fits or not 0 <= tolerance < math.inf:
        raise errors.UsageError(
            "the tolerance must be a fraction",
            argument="tolerance",
            expected="a fraction of at least 0: 0.1 for a tenth",
            got=shown(tolerance),
            hint="call `benchmark.against(earlier, tolerance=0.1)`",
        )


def _incomparable(now: Benchmark, earlier: Benchmark) -> Iterable[str]:
    """Yield the differences between two runs that make their times incomparable."""
    for name in STRICT:
        one, other = earlier.environment.get(name), now.environment.get(name)
        if one != other:
            yield f"{name} was {one}, and is {other}"
    if earlier.threads != now.threads:
        yield f"threads were {earlier.threads}, and are {now.threads}"


def _named(case: BenchmarkCase) -> str:
    return f"{case.label} ({case.dtype}, {case.device})"


def _own(case: BenchmarkCase) -> set[str]:
    return {each.name for each in case.contenders if each.kind == "operator"}


def _unchanged(now: BenchmarkCase, earlier: BenchmarkCase) -> set[str]:
    """Return the contenders with unchanged code: only the machine can have changed their times."""
    before = {each.name: each.source for each in earlier.contenders}
    return {each.name for each in now.contenders if each.source and before.get(each.name) == each.source}


def _scatter(pairs: Sequence[tuple[BenchmarkCase, BenchmarkCase]]) -> float:
    """Return the scatter of two runs of the same code, as a standard deviation of logarithms of ratios."""
    ratios: dict[str, list[float]] = {}
    for case, other in pairs:
        same = {*CONTROLS, *_unchanged(case, other)}
        for timing in case.timings:
            before = other.timing(timing.contender, timing.direction)
            if before is not None and timing.contender in same:
                moved = math.log(timing.spread.median / before.spread.median)
                ratios.setdefault(timing.contender, []).append(moved)
    distances = []
    for moves in ratios.values():
        centre = statistics.median(moves) if len(moves) >= CENTRED else 0.0
        distances += [abs(each - centre) for each in moves]
    return 1.4826 * statistics.median(distances) if distances else 0.0


def _changes(
    now: BenchmarkCase, earlier: BenchmarkCase, scatter: float, tolerance: float
) -> Iterable[TimeChange]:
    for timing in now.timings:
        before = earlier.timing(timing.contender, timing.direction)
        if timing.contender in CONTROLS or before is None:
            continue
        controls = [
            (old.seconds, new.seconds)
            for name in {*CONTROLS, *_unchanged(now, earlier)} - {timing.contender}
            for old, new in [
                (earlier.timing(name, timing.direction), now.timing(name, timing.direction)),
            ]
            if old is not None and new is not None
        ]
        yield judge(
            before.seconds,
            timing.seconds,
            controls,
            tolerance,
            scatter=scatter,
            names=(_named(now), timing.contender, timing.direction),
            judged=timing.contender in _own(now),
        )


def judge(
    before: Sequence[float],
    now: Sequence[float],
    controls: Iterable[tuple[Sequence[float], Sequence[float]]] = (),
    tolerance: float = TOLERANCE,
    *,
    scatter: float = 0.0,
    names: tuple[str, str, str] = ("", "", ""),
    judged: bool = True,
) -> TimeChange:
    """Judge one row.

    Args:
        before, now: Seconds of a call in each round. controls: The same for each control, before and now.
            tolerance: See `verdict`.
        scatter: Scatter of two runs of the same code, as a logarithm.
        names: Names of case, contender and direction. judged: See `TimeChange`.

    Example:
        >>> judge([1.0, 1.1, 1.0, 1.2], [1.6, 1.7, 1.6, 1.9]).kind
        'slower'
        >>> judge([1.0, 1.1, 1.0, 1.2], [1.6, 1.7, 1.6, 1.9], [([2.0, 2.1], [3.1, 3.2])]).kind
        'unclear'
    """
    old, new = spread(before), spread(now)
    moved = [(spread(one), spread(two)) for one, two in controls]
    drifts = [1.0, *(two.median / one.median for one, two in moved)]
    leasts = [1.0, *(two.least / one.least for one, two in moved)]
    ratio, least = new.median / old.median, new.least / old.least
    noise = math.exp(SCATTERS * scatter)
    low, high = new.low / old.high / max(drifts) / noise, new.high / old.low / min(drifts) * noise
    beyond = 1 + tolerance
    if low > beyond and least / max(leasts) / noise > beyond:
        kind = "slower"
    elif high < 1 / beyond and least / min(leasts) * noise < 1 / beyond:
        kind = "faster"
    else:
        kind = "same" if 1 / beyond <= ratio <= beyond else "unclear"
    # A slowdown counts if it exceeds the loss to quartiles or least times, drift and scatter: a row is slower
    # if and only if its ratio is beyond `detectable`.
    by_quartiles = (new.median / new.low) * (old.high / old.median) * max(drifts)
    lost = max(by_quartiles, ratio / least * max(leasts)) * noise
    return TimeChange(
        *names,
        before=old.median,
        now=new.median,
        ratio=ratio,
        low=low,
        high=high,
        drift=(min(drifts), max(drifts)),
        detectable=beyond * lost,
        kind=kind,
        judged=judged,
    )
