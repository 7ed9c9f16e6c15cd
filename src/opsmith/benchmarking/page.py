"""Show a benchmark as an HTML page, with pictures if matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from opsmith import errors
from opsmith.benchmarking import text
from opsmith.benchmarking.result import Benchmark
from opsmith.checking.output.html import source, templates


@dataclass(frozen=True)
class BenchmarkResult:
    """A benchmark with its pictures.

    Args:
        benchmark: The benchmark.
        plots: An `<svg>` element by name. unpictured: The reason why there are no plots; empty if there are
            some.
    """

    benchmark: Benchmark
    plots: Mapping[str, str]
    unpictured: str = ""


def pictured(made: Benchmark) -> BenchmarkResult:
    """A benchmark with its plots, if the packages for plots are installed."""
    try:
        from opsmith.benchmarking.plotting import plots
    except errors.MissingExtraError as error:
        return BenchmarkResult(made, {}, str(error))
    return BenchmarkResult(made, plots(made))


def benchmark_page(made: Benchmark) -> str:
    """A page about one benchmark: the tables, the pictures and the legend.

    Example:
        >>> "nothing was timed" in benchmark_page(Benchmark("demo::twice", "quick", 0, 1, {}, {}, (), ()))
        True
    """
    environment = templates("opsmith.benchmarking")
    environment.globals["benchmark_text"] = text
    result = pictured(made)
    return environment.get_template("benchmark_page.html").render(
        made=made,
        plots=result.plots,
        unpictured=result.unpictured,
        styles=[source(environment, "page.css")],
        scripts=[],
    )
