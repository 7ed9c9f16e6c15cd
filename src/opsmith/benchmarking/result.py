"""Result of a benchmark as a plain value: print it, plot it, store it as JSON, compare two of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opsmith import errors
from opsmith.benchmarking.timing import Ratio, Spread, ratio, spread
from opsmith.core.json_documents import DocumentFormat, from_json
from opsmith.display import framed, short_repr, titled_repr

if TYPE_CHECKING:
    from opsmith.benchmarking.verdict import Verdict

SCHEMA = 2
"""Version of `Benchmark.to_json`; it increases when a key is renamed or removed, or changes its meaning."""

DIRECTIONS = ("forward", "backward", "both")
CONTROLS = ("copy", "multiply")
"""Controls: code that never changes, timed with the contenders, so that it shows a slower machine."""


@dataclass(frozen=True)
class Ceiling:
    """Largest rate of the machine, measured in the same run.

    Args:
        device: Type of the device.
        kind: `copy` (bytes read and written per second) or `multiply` (floating-point operations per second).
        rate: The rate.
        bytes: Bytes read plus bytes written by a copy.
        dtype: dtype of a product of matrices.
    """

    __repr__ = short_repr

    device: str
    kind: str
    rate: float
    bytes: int | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class Contender:
    """One implementation of the operator.

    Args:
        name: `native`, `operator`, `reference`, `compiled`, or the name of a baseline.
        kind: `operator`, `reference`, `compiled` or `baseline`.
        by: Description of the implementation.
        compile_s: Seconds of its first calls, with compilation; None if nothing is compiled.
        left_out: Reason why it was not timed; empty if it was timed.
        source: Hash of its code, if known.
    """

    __repr__ = short_repr

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
        contender: Name of the contender or control.
        direction: `forward` (without gradients), `backward` (alone) or `both` (one after the other).
        calls: Number of calls in each turn.
        seconds: Seconds of a call, for each round.
    """

    __repr__ = short_repr

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
    """Work of one direction, the same for each contender.

    Args:
        direction: See `Timing`.
        bytes: Bytes of its arguments and results, which must be moved at least.
        flops: Floating-point operations of the reference, or from the author's function; None if not counted.
            counted: Method of counting, or the reason why they are not counted.
    """

    __repr__ = short_repr

    direction: str
    bytes: int
    flops: int | None
    counted: str


@dataclass(frozen=True)
class MemoryUse:
    """Memory use of one contender.

    Args:
        contender: Its name.
        saved: Bytes saved for the backward, each storage once; None if there is no backward.
        beyond: The same without the arguments, which the caller keeps anyway.
        peak: Peak of the bytes that a call forward and backward allocates, if it was measured.
        remark: Method by which the peak was measured, or the reason why it was not.
    """

    __repr__ = short_repr

    contender: str
    saved: int | None
    beyond: int | None
    peak: int | None
    remark: str


@dataclass(frozen=True)
class BenchmarkCase:
    """One size, in one dtype, on one device.

    Args:
        label: Its label. sizes: Its sizes by name. arguments: Description of each argument. elements: Number
            of elements of all tensor arguments.
        dtype: dtype of floating inputs.
        device: Type of the device.
        role: `call` for the tiny size, which measures the overhead of a call; `size` for all other sizes.
        contenders: All contenders, including those left out.
        timings: Times of contenders and controls.
        work: Work by direction.
        memory: Memory by contender.
        notes: Measurements that are missing, with the reason.
    """

    __repr__ = short_repr

    label: str
    sizes: Mapping[str, int] = field(hash=False)
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
        """Key that identifies the same case in two runs."""
        return (self.role, self.device, self.dtype, self.arguments)

    def timing(self, contender: str, direction: str) -> Timing | None:
        """Return the times of a contender or control; None if there are none."""
        found = (each for each in self.timings if (each.contender, each.direction) == (contender, direction))
        return next(found, None)

    def ratio(self, contender: str, direction: str, to: str = "reference") -> Ratio | None:
        """Return the ratio of the times of two contenders; None if one of them was not timed."""
        one, other = self.timing(contender, direction), self.timing(to, direction)
        return None if one is None or other is None else ratio(one.seconds, other.seconds)

    def work_of(self, direction: str) -> Work | None:
        """Return the work of a direction."""
        return next((each for each in self.work if each.direction == direction), None)

    def memory_of(self, contender: str) -> MemoryUse | None:
        """Return the memory of a contender."""
        return next((each for each in self.memory if each.contender == contender), None)

    @property
    def directions(self) -> tuple[str, ...]:
        """Timed directions, in their order."""
        return tuple(name for name in DIRECTIONS if any(each.direction == name for each in self.timings))


@dataclass(frozen=True)
class Benchmark:
    """Result of `opsmith.benchmark`; `print` shows it.

    Args:
        operator: The operator's name.
        effort: Level of effort.
        seed: Seed of the inputs.
        threads: Number of threads of torch.
        environment: Versions and machine.
        load: Load average of the machine before and after, and its number of processors.
        ceilings: Largest rates of the machine.
        cases: One for each size, dtype and device.
        remarks: Remarks on the whole benchmark. spent: Seconds of the benchmark, `total`, and of its parts:
            `check` (including the compilation of kernels that are not in the cache), `compilation` of the
            reference, and `rounds`.

    Example:
        >>> Benchmark("demo::twice", "quick", 0, 1, {}, {}, (), ()).wrong  # nothing was measured
        ()
    """

    operator: str
    effort: str
    seed: int
    threads: int
    environment: Mapping[str, str] = field(hash=False)
    load: Mapping[str, float] = field(hash=False)
    ceilings: tuple[Ceiling, ...]
    cases: tuple[BenchmarkCase, ...]
    remarks: tuple[str, ...] = field(default=())
    spent: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def wrong(self) -> tuple[str, ...]:
        """Sizes at which the operator was not timed, because it raises or its result is wrong."""
        return tuple(
            f"{case.label} ({case.dtype}, {case.device})"
            for case in self.cases
            if any(each.kind == "operator" and each.left_out for each in case.contenders)
        )

    def bandwidth(self, device: str, moved: int) -> float | None:
        """Return the bytes per second of a copy of this size; caches make small copies fast.

        Between the sizes of two measured copies the larger rate counts.
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
        """Return the floating-point operations per second of a matrix product."""
        found = (each for each in self.ceilings if (each.device, each.dtype) == (device, dtype))
        return next((each.rate for each in found if each.kind == "multiply"), None)

    def floor_s(self, case: BenchmarkCase, direction: str) -> float | None:
        """Return the minimum seconds of the work at the ceilings: to move its bytes or to compute."""
        work = case.work_of(direction)
        bandwidth = None if work is None else self.bandwidth(case.device, work.bytes)
        if work is None or not bandwidth:
            return None
        rate = self.multiplication(case.device, case.dtype)
        computing = work.flops / rate if work.flops and rate else 0.0
        return max(work.bytes / bandwidth, computing)

    def fraction(self, case: BenchmarkCase, contender: str, direction: str) -> float | None:
        """Return the fraction of the ceiling that a contender reaches: `floor_s` over its median."""
        floor, timing = self.floor_s(case, direction), case.timing(contender, direction)
        return None if floor is None or timing is None else floor / timing.spread.median

    @property
    def above(self) -> bool:
        """True if a contender took less time than the ceilings allow, as `fraction` says."""
        return any(
            (self.fraction(case, each.contender, each.direction) or 0) > 1
            for case in self.cases
            if case.role == "size"
            for each in case.timings
            if each.contender not in CONTROLS
        )

    def against(self, earlier: Benchmark, *, tolerance: float = 0.1) -> Verdict:
        """Compare with an earlier benchmark, allowing for the noise of both.

        Args:
            earlier: The earlier benchmark, of the same operator.
            tolerance: Smallest slowdown that counts, as a fraction.

        Raises:
            UsageError: If they are of different operators, or `tolerance` is not a fraction.
        """
        from opsmith.benchmarking.verdict import verdict

        return verdict(self, earlier, tolerance)

    def to_dict(self) -> dict[str, Any]:
        """Return the benchmark in JSON's types, versioned by `"schema"`."""
        return {"schema": SCHEMA, **asdict(self)}

    def to_json(self) -> str:
        """Return the benchmark as JSON text; `benchmark.schema.json` in this folder describes it."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Benchmark:
        """Read a benchmark from the output of `to_json`.

        Raises:
            BenchmarkFormatError: If it is not a benchmark, or has a different version.

        Example:
            >>> empty = Benchmark("demo::twice", "quick", 0, 1, {}, {}, (), ())
            >>> Benchmark.from_json(empty.to_json()) == empty
            True
        """
        made = [*benchmarks_in(text).values()]
        if len(made) != 1:
            raise FORMAT.error(
                "the text must contain one benchmark",
                expected="the output of `Benchmark.to_json()`",
                got=f"{len(made)} benchmarks",
                hint="read each item of its list `benchmarks`",
            )
        return made[0]

    def __str__(self) -> str:
        from opsmith.benchmarking.text import text

        return text(self)

    def _repr_html_(self) -> str:
        from opsmith.benchmarking.page import benchmark_page

        return framed(benchmark_page(self), 640, f"benchmark of {self.operator}")

    __repr__ = titled_repr(lambda made: f"{made.operator}: {made.effort} effort, {_fastest(made)}")


def _fastest(benchmark: Benchmark) -> str:
    """The fastest contender of the last size, in a few words."""
    case = next((each for each in reversed(benchmark.cases) if each.timings), None)
    if case is None:
        return "nothing was timed"
    direction = case.directions[-1]
    names = {each.name for each in case.contenders}
    timings = [each for each in case.timings if each.direction == direction and each.contender in names]
    fastest = min(timings, key=lambda each: each.spread.median).contender
    ratio = case.ratio(fastest, direction)
    beside = "" if ratio is None or fastest == "reference" else f", {ratio.median:.2f} × the reference's time"
    return f"at {case.label} ({direction}) `{fastest}` is the fastest{beside}"


def benchmarks_in(text: str | bytes, file: Path | None = None) -> dict[str, Benchmark]:
    """Read the benchmarks of a file, by the names of their operators.

    Args:
        text: Output of `opsmith benchmark --json` or of `Benchmark.to_json()`.
        file: The file that contains it, for messages.

    Raises:
        BenchmarkFormatError: If it is not a benchmark, or has a different version.

    Example:
        >>> empty = Benchmark("demo::twice", "quick", 0, 1, {}, {}, (), ())
        >>> list(benchmarks_in(empty.to_json()))
        ['demo::twice']
    """
    made: dict[str, Benchmark] = {
        path: from_json(entry, Benchmark) for path, entry in FORMAT.read(text, file).items()
    }
    for path, benchmark in made.items():
        for position, case in enumerate(benchmark.cases):
            _refuse_unpaired(case, file, f"{path}.cases[{position}].timings")
    return {each.operator: each for each in made.values()}


def _refuse_unpaired(case: BenchmarkCase, file: Path | None, where: str) -> None:
    """Raise an error if contenders of a case have different rounds: ratios are computed round by round."""
    for direction in case.directions:
        rounds = {len(each.seconds) for each in case.timings if each.direction == direction}
        if len(rounds) > 1:
            raise FORMAT.refusal(
                file,
                "the same number of seconds for each contender",
                f"{' and '.join(map(str, sorted(rounds)))} of {direction}",
                where,
            )


FORMAT = DocumentFormat(
    errors.BenchmarkFormatError,
    "benchmark",
    Path(__file__).with_name("benchmark.schema.json"),
    "measure again with this version: `opsmith benchmark ... -o FILE`, or `Benchmark.to_json()`",
)
