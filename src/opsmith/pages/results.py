"""Reports and benchmarks: measured now, or read from files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opsmith import errors
from opsmith.benchmarking import Benchmark, benchmark
from opsmith.benchmarking.result import benchmarks_in
from opsmith.checking import Report
from opsmith.checking.output.json import read_reports
from opsmith.core.operator import Operator


@dataclass(frozen=True)
class BenchmarkResult:
    """A benchmark with its pictures.

    Args:
        benchmark: The benchmark.
        plots: An `<svg>` element by name.
        unpictured: The reason why there are none; empty if there are.
    """

    benchmark: Benchmark
    plots: Mapping[str, str]
    unpictured: str = ""


def measured(operator: Operator[..., Any], report: Report | None) -> Benchmark:
    """Measure an operator, at quick effort.

    Raises:
        NotPassedError: If it fails its check.
        OpsmithError: If it cannot be measured for another reason.
    """
    return benchmark(operator, effort="quick", report=report)


def pictured(made: Benchmark) -> BenchmarkResult:
    """A benchmark with its plots, if the packages for plots are installed."""
    try:
        from opsmith.benchmarking.plotting import plots
    except errors.MissingExtraError as error:
        return BenchmarkResult(made, {}, str(error))
    return BenchmarkResult(made, plots(made))


def read_benchmarks(file: Path) -> dict[str, Benchmark]:
    """The benchmarks of a file, by the names of their operators.

    Args:
        file: Output of `opsmith benchmark --json` or of `Benchmark.to_json()`.

    Raises:
        UsageError: If it cannot be read.
        BenchmarkFormatError: If it is not a benchmark.
    """
    return benchmarks_in(readable(file, "opsmith benchmark ... -o"))


def readable(file: Path, command: str) -> str:
    """The text of a file.

    Args:
        file: The file.
        command: The command that writes such a file, up to the name of the file.

    Raises:
        UsageError: If it cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise errors.UsageError(
            f"`{file}` cannot be read",
            expected=f"what `{command} FILE` writes",
            got=getattr(error, "strerror", None) or str(error),
            hint=f"make it first: `{command} {file}`",
        ) from error


def read_reports_of(file: Path) -> dict[str, Report]:
    """The reports of a file, by the names of their operators.

    Args:
        file: Output of `opsmith check --json`.

    Raises:
        UsageError: If it cannot be read, or holds something else.
    """
    return read_reports(readable(file, "opsmith check ... --json >"))
