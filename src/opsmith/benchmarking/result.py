"""What a benchmark measured, as one plain value: printed, plotted, kept as JSON, compared with another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from opsmith import errors
from opsmith.benchmarking.timing import Ratio, Spread, ratio, spread
from opsmith.core.call_arguments import shown
from opsmith.core.json_values import JsonMismatchError, from_json, parse

if TYPE_CHECKING:
    from opsmith.benchmarking.verdict import Verdict

SCHEMA = 2
"""Version of what `Benchmark.to_json` writes; it changes when a key changes its meaning or goes."""

DIRECTIONS = ("forward", "backward", "both")
CONTROLS = ("copy", "multiply")
"""What is timed beside the contenders and never changes: what a slower machine slows down."""


@dataclass(frozen=True)
class Ceiling:
    """What the machine does at most, measured in the same run.

    Args:
        device: Type of the device.
        kind: `copy`: bytes read and written in a second; `multiply`: floating-point operations in a second.
        rate: So many.
        bytes: Of a copy: how many bytes it reads and writes together.
        dtype: Of a product of matrices: its dtype.
    """

    device: str
    kind: str
    rate: float
    bytes: int | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class Contender:
    """One way to compute the operator.

    Args:
        name: `native`, `operator`, `reference`, `compiled`, or that of a baseline.
        kind: `operator`, `reference`, `compiled` or `baseline`.
        by: What computes it.
        compile_s: How long its first calls took, which compile; None where nothing is compiled.
        left_out: Why it was not timed; empty where it was.
        source: Hash of the code of what is computed, where it is known not to change by itself.
    """

    name: str
    kind: str
    by: str
    compile_s: float | None = None
    left_out: str = ""
    source: str = ""


@dataclass(frozen=True)
class Timing:
    """Times of one contender in one direction.

    Args:
        contender: Its name, or that of a control.
        direction: `forward`, without gradients; `backward`, alone; or `both`, one after the other.
        calls: How many calls each turn made.
        seconds: For each round, how long a call took.
    """

    contender: str
    direction: str
    calls: int
    seconds: tuple[float, ...]

    @property
    def spread(self) -> Spread:
        """Median and quartiles."""
        return spread(self.seconds)


@dataclass(frozen=True)
class Work:
    """What one direction has to do, whoever does it.

    Args:
        direction: As of `Timing`.
        bytes: Of its arguments and results: what has to be moved at least.
        flops: Floating-point operations of the reference, or by the author's formula; None: not counted.
        counted: How they were counted, or why not.
    """

    direction: str
    bytes: int
    flops: int | None
    counted: str


@dataclass(frozen=True)
class MemoryUse:
    """MemoryUse of one contender.

    Args:
        contender: Its name.
        saved: Bytes kept for the backward, each storage once; None where there is no backward.
        beyond: Those of them that are no argument, which the caller keeps anyway.
        peak: Bytes that a call forward and backward holds at most beyond those before, if it was measured.
        remark: How the peak was measured, or why not.
    """

    contender: str
    saved: int | None
    beyond: int | None
    peak: int | None
    remark: str


@dataclass(frozen=True)
class BenchmarkCase:
    """One size, in one dtype, on one device.

    Args:
        label: What to call it.
        sizes: Its letters, or what was given for it.
        arguments: Each argument, in words.
        elements: How many elements the tensors among them have.
        dtype: dtype of floating inputs.
        device: Type of the device.
        role: `call` for the tiny one, which tells what a call costs; `size` for all others.
        contenders: Who took part, and who could not.
        timings: What was measured, controls among them.
        work: What there was to do, by direction.
        memory: Who needs how much.
        notes: What could not be measured, and why.
    """

    label: str
    sizes: Mapping[str, int]
    arguments: tuple[str, ...]
    elements: int
    dtype: str
    device: str
    role: str
    contenders: tuple[Contender, ...]
    timings: tuple[Timing, ...]
    work: tuple[Work, ...]
    memory: tuple[MemoryUse, ...]
    notes: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """What two runs have in common if they measured the same."""
        return (self.role, self.device, self.dtype, self.arguments)

    def timing(self, contender: str, direction: str) -> Timing | None:
        """The times of a contender, or control; None where there are none."""
        found = (each for each in self.timings if (each.contender, each.direction) == (contender, direction))
        return next(found, None)

    def ratio(self, contender: str, direction: str, to: str = "reference") -> Ratio | None:
        """How many times as long as another a contender takes; None where one of them was not timed."""
        one, other = self.timing(contender, direction), self.timing(to, direction)
        return None if one is None or other is None else ratio(one.seconds, other.seconds)

    def work_of(self, direction: str) -> Work | None:
        """What a direction has to do."""
        return next((each for each in self.work if each.direction == direction), None)

    def memory_of(self, contender: str) -> MemoryUse | None:
        """The memory of a contender."""
        return next((each for each in self.memory if each.contender == contender), None)

    @property
    def directions(self) -> tuple[str, ...]:
        """Those that were timed, in their order."""
        return tuple(name for name in DIRECTIONS if any(each.direction == name for each in self.timings))


@dataclass(frozen=True)
class Benchmark:
    """The answer of `opsmith.benchmark`; printing it shows it.

    Args:
        operator: The operator's name.
        effort: How long it measured.
        seed: Seed of the inputs.
        threads: How many threads torch had.
        environment: Versions and machine.
        load: The load of the machine before and after: how many programs wanted to run, over a minute; and
            how many processors there are.
        ceilings: What the machine does at most.
        cases: What was measured.
        remarks: What a reader has to know of all of it.

    Example:
        >>> Benchmark("demo::twice", "quick", 0, 1, {}, {}, (), ()).wrong  # nothing was measured
        ()
    """

    operator: str
    effort: str
    seed: int
    threads: int
    environment: Mapping[str, str]
    load: Mapping[str, float]
    ceilings: tuple[Ceiling, ...]
    cases: tuple[BenchmarkCase, ...]
    remarks: tuple[str, ...] = field(default=())

    @property
    def wrong(self) -> tuple[str, ...]:
        """Sizes at which the operator itself was not timed: it raises, or computes another result there."""
        return tuple(
            f"{case.label} ({case.dtype}, {case.device})"
            for case in self.cases
            if any(each.kind == "operator" and each.left_out for each in case.contenders)
        )

    def bandwidth(self, device: str, moved: int) -> float | None:
        """Bytes in a second of a copy that moves as many as these: caches make small copies fast.

        Between two copies that were measured it is the larger's rate that counts if it is larger.
        """
        copies = sorted(
            (each.bytes or 0, each.rate)
            for each in self.ceilings
            if each.kind == "copy" and each.device == device
        )
        if not copies:
            return None
        below = [rate for size, rate in copies if size <= moved] or [copies[0][1]]
        above = [rate for size, rate in copies if size > moved]
        return max(below[-1], above[0]) if above else below[-1]

    def multiplication(self, device: str, dtype: str) -> float | None:
        """Floating-point operations in a second of a product of matrices."""
        found = (each for each in self.ceilings if (each.device, each.dtype) == (device, dtype))
        return next((each.rate for each in found if each.kind == "multiply"), None)

    def floor_s(self, case: BenchmarkCase, direction: str) -> float | None:
        """How long the work takes at the ceilings, at least: to move its bytes, or to compute it."""
        work = case.work_of(direction)
        bandwidth = None if work is None else self.bandwidth(case.device, work.bytes)
        if work is None or not bandwidth:
            return None
        rate = self.multiplication(case.device, case.dtype)
        computing = work.flops / rate if work.flops and rate else 0.0
        return max(work.bytes / bandwidth, computing)

    def fraction(self, case: BenchmarkCase, contender: str, direction: str) -> float | None:
        """What part of the ceiling a contender reaches: how long the floor is beside its median."""
        floor, timing = self.floor_s(case, direction), case.timing(contender, direction)
        return None if floor is None or timing is None else floor / timing.spread.median

    def against(self, earlier: Benchmark, *, tolerance: float = 0.1) -> Verdict:
        """What became slower or faster since an earlier benchmark, as far as the noise of both tells.

        Args:
            earlier: The earlier one, of the same operator.
            tolerance: By what part a row must have become slower to be called slower.

        Raises:
            UsageError: If they are of two operators, or `tolerance` is no part.
        """
        from opsmith.benchmarking.verdict import verdict

        return verdict(self, earlier, tolerance)

    def to_dict(self) -> dict[str, Any]:
        """The benchmark in JSON's types, versioned by `"schema"`."""
        return {"schema": SCHEMA, **asdict(self)}

    def to_json(self) -> str:
        """The benchmark as JSON text; `benchmark.schema.json` beside this module describes it."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    @classmethod
    def from_dict(cls, read: Any) -> Benchmark:
        """The benchmark of what `to_dict` gave.

        Raises:
            BenchmarkFormatError: If it is something else, or of another version.
        """
        if not isinstance(read, Mapping) or "schema" not in read or "cases" not in read:
            keys = ", ".join(map(str, list(read)[:6])) if isinstance(read, Mapping) else ""
            got = f"the keys {keys}" if isinstance(read, Mapping) else shown(read)
            raise _not_a_benchmark("an object with the keys `schema` and `cases`", got)
        if read["schema"] != SCHEMA:
            raise errors.BenchmarkFormatError(
                "a benchmark of another version cannot be compared",
                expected=f"schema {SCHEMA}",
                got=f"schema {shown(read['schema'])}",
                hint="measure again what it measured, with this version of opsmith",
            )
        try:
            made = from_json(read, cls)
        except JsonMismatchError as error:
            raise _not_a_benchmark(error.expected, error.got) from error
        for at, case in enumerate(made.cases):
            for number, timing in enumerate(case.timings):
                if not timing.seconds or min(timing.seconds) <= 0:
                    path = f"cases[{at}].timings[{number}].seconds"
                    raise _not_a_benchmark(f"times above 0, one at least for `{path}`", shown(timing.seconds))
        return made

    @classmethod
    def from_json(cls, text: str) -> Benchmark:
        """The benchmark of what `to_json` wrote.

        Raises:
            BenchmarkFormatError: If it is something else, or of another version.

        Example:
            >>> empty = Benchmark("demo::twice", "quick", 0, 1, {}, {}, (), ())
            >>> Benchmark.from_json(empty.to_json()) == empty
            True
        """
        return cls.from_dict(_parse(text))

    def __str__(self) -> str:
        from opsmith.benchmarking.text import text

        return text(self)


def benchmarks_in(text: str) -> dict[str, Benchmark]:
    """The benchmarks of a file, by the names of their operators.

    Args:
        text: What `opsmith benchmark --json` printed, or `Benchmark.to_json()` gave.

    Raises:
        BenchmarkFormatError: If it is something else.

    Example:
        >>> empty = Benchmark("demo::twice", "quick", 0, 1, {}, {}, (), ())
        >>> list(benchmarks_in(empty.to_json()))
        ['demo::twice']
    """
    read = _parse(text)
    several = read.get("benchmarks") if isinstance(read, Mapping) else None
    made = [Benchmark.from_dict(each) for each in (several if isinstance(several, list) else [read])]
    return {each.operator: each for each in made}


def _parse(text: str) -> Any:
    try:
        return parse(text)
    except JsonMismatchError as error:
        raise _not_a_benchmark(error.expected, error.got) from error


def _not_a_benchmark(expected: str, got: str) -> errors.BenchmarkFormatError:
    return errors.BenchmarkFormatError(
        "this is no benchmark that opsmith wrote",
        expected=expected,
        got=got,
        hint="give what `opsmith benchmark --json` printed, or `Benchmark.to_json()` returned",
    )
