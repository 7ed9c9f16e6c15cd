"""A benchmark beside an earlier one: what became slower, as far as the noise of both lets one say so.

A row is called slower only where all of this holds by more than `tolerance`:

- The quartiles are apart: the faster half of today's times lies beyond the slower half of those before.
- So are the least times: noise only adds, and a machine that was disturbed still has its moments.
- Both hold whether the machine's drift is taken off or not. The drift is what the controls tell: a copy and a
  product of matrices, and the reference, also compiled, where its source is the same: all are timed in the
  same rounds as the operator, in both runs. They are no measure of what a disturbance does to everything
  else, so all of what they allow is conceded.
- Both hold after three times the scatter is taken off. No two runs are alike: memory lies elsewhere, another
  core is used. How much that does is seen on the controls, whose code has not changed: how far the ratios of
  each lie from their own median (the median of these distances, times 1.4826, which is a standard deviation
  where they are normal: F. R. Hampel, "The influence curve and its role in robust estimation", 1974).

Each row tells the smallest slowdown that it would have shown. Only the operator's own rows are judged:
rivals, and what torch makes of the reference, are told.
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

TOLERANCE = 0.1
"""By what part a row must have become slower at least to be called slower."""

NOISY = 1.5
"""Where a row would have to take so many times as long to be called slower, the noise is said to be much."""

SCATTERS = 3
"""So many times the scatter is conceded."""
CENTRED = 3
"""Ratios of a contender that are enough to tell what has become of it from how they scatter."""

STRICT = ("machine", "processor", "devices", "torch")
"""What must be the same in both environments, for two times to be of the same thing."""


@dataclass(frozen=True)
class TimeChange:
    """What became of one row.

    Args:
        case: Label of the size.
        contender, direction: Whose times.
        before, now: Medians in seconds.
        ratio: How many times as long it takes now.
        low, high: Between these the ratio lies, once spreads, drift and scatter are conceded.
        drift: What the machine itself became slower, by its controls: the least and the most.
        detectable: The smallest slowdown that would have been called one.
        kind: `slower`, `faster`, `same`, or `unclear`: it looks like a change, and noise may explain it.
        judged: Whether it counts: whether it is a row of the operator itself.
    """

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
    """A benchmark beside an earlier one; printing it shows it.

    Args:
        operator: The operator's name.
        apart: What differs between the two runs so that their times are not of the same thing.
        changes: What became of each row that both have.
        missing: Rows that only one of them has.
    """

    operator: str
    apart: tuple[str, ...]
    changes: tuple[TimeChange, ...]
    missing: tuple[str, ...]

    @property
    def comparable(self) -> bool:
        """Whether times of the two runs can be compared strictly, and there are some to compare."""
        return not self.apart and any(change.judged for change in self.changes)

    @property
    def slower(self) -> tuple[TimeChange, ...]:
        """Rows of the operator that became slower, beyond doubt; none where the runs cannot be compared."""
        if not self.comparable:
            return ()
        return tuple(change for change in self.changes if change.judged and change.kind == "slower")

    @property
    def passed(self) -> bool:
        """Whether the runs can be compared, and nothing became slower."""
        return self.comparable and not self.slower

    def __str__(self) -> str:
        judged = [change for change in self.changes if change.judged]
        if self.apart:
            lines = [f"{self.operator}: NOT COMPARABLE: {'; '.join(self.apart)}"]
        elif not judged:
            lines = [f"{self.operator}: NOT COMPARABLE: the two runs have no row of it in common"]
        elif self.slower:
            lines = [f"{self.operator}: SLOWER in {len(self.slower)} of {len(judged)} rows"]
        else:
            most = max(change.detectable for change in judged)
            seen = f"{most:.2f} times as long would have been seen in any row"
            lines = [f"{self.operator}: not slower; {seen}"]
            if most > NOISY:
                seen = f"less than {most:.2f} times as long would not have been seen in every row"
                lines = [f"{self.operator}: NOT SEEN to be slower, among much noise: {seen}"]
        told = self.slower or [change for change in judged if change.kind != "same"]
        lines += [f"  {change}" for change in told]
        if not self.apart and any(change.kind == "unclear" for change in judged):
            lines.append("  unclear: noise may explain it; measure both again, with nothing else running")
        lines += [f"  only in one of the runs: {each}" for each in self.missing]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The verdict in JSON's types."""
        return {**asdict(self), "comparable": self.comparable, "passed": self.passed}


def verdict(now: Benchmark, earlier: Benchmark, tolerance: float = TOLERANCE) -> Verdict:
    """Judge a benchmark by an earlier one.

    Args:
        now: What was measured.
        earlier: What was measured before.
        tolerance: By what part a row must have become slower to be called slower: 0.1 for a tenth.

    Raises:
        UsageError: If they are of two operators, or `tolerance` is no part.
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
    apart = _scatter(pairs)
    changes = [change for case, other in pairs for change in _changes(case, other, apart, tolerance)]
    return Verdict(now.operator, tuple(_apart(now, earlier)), tuple(changes), tuple(missing))


def _keyed(cases: Iterable[BenchmarkCase]) -> dict[tuple[Any, int], BenchmarkCase]:
    """Cases by what two runs have in common; those that are alike in it are told apart by their order."""
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
    """Refuse what is no tolerance.

    Raises:
        UsageError: If it is none.
    """
    fits = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    if not fits or not 0 <= tolerance < math.inf:
        raise errors.UsageError(
            "this is no tolerance",
            argument="tolerance",
            expected="a part, from 0 on: 0.1 for a tenth",
            got=shown(tolerance),
            hint="call `benchmark.against(earlier, tolerance=0.1)`",
        )


def _apart(now: Benchmark, earlier: Benchmark) -> Iterable[str]:
    """In what the two runs differ so that times of theirs are not of the same thing."""
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
    """Contenders whose code is the same in both runs: a change of their times is the machine's."""
    before = {each.name: each.source for each in earlier.contenders}
    return {each.name for each in now.contenders if each.source and before.get(each.name) == each.source}


def _scatter(pairs: Sequence[tuple[BenchmarkCase, BenchmarkCase]]) -> float:
    """How far apart two runs are that measure the same: of logarithms of ratios, where code is the same."""
    ratios: dict[str, list[float]] = {}
    for case, other in pairs:
        same = {*CONTROLS, *_unchanged(case, other)}
        for timing in case.timings:
            before = other.timing(timing.contender, timing.direction)
            if before is not None and timing.contender in same:
                moved = math.log(timing.spread.median / before.spread.median)
                ratios.setdefault(timing.contender, []).append(moved)
    far = []
    for moves in ratios.values():
        centre = statistics.median(moves) if len(moves) >= CENTRED else 0.0
        far += [abs(each - centre) for each in moves]
    return 1.4826 * statistics.median(far) if far else 0.0


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
        before, now: Seconds of a call, round by round.
        controls: The same of what never changes, before and now.
        tolerance: As of `verdict`.
        scatter: How far apart two runs are that measure the same, as a logarithm.
        names: Of case, contender and direction.
        judged: As of `Change`.

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
    unlike = math.exp(SCATTERS * scatter)
    low, high = new.low / old.high / max(drifts) / unlike, new.high / old.low / min(drifts) * unlike
    beyond = 1 + tolerance
    if low > beyond and least / max(leasts) / unlike > beyond:
        kind = "slower"
    elif high < 1 / beyond and least / min(leasts) * unlike < 1 / beyond:
        kind = "faster"
    else:
        kind = "same" if 1 / beyond <= ratio <= beyond else "unclear"
    # What quartiles or least times, drift and scatter leave of a slowdown has to be made up for before it can
    # be told: a row is slower where its ratio is beyond this, and nowhere else.
    by_quartiles = (new.median / new.low) * (old.high / old.median) * max(drifts)
    lost = max(by_quartiles, ratio / least * max(leasts)) * unlike
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
