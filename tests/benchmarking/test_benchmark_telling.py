"""Reports of a benchmark: ceilings, tables, remarks; as text and on a terminal."""

from __future__ import annotations

import io
import sys
from dataclasses import replace

import pytest
from planted import planted
from rich.console import Console

from opsmith import errors
from opsmith.benchmarking.result import Benchmark, Timing
from opsmith.benchmarking.text import amount, duration, part, rendered


@pytest.fixture
def exact() -> Benchmark:
    """Times without noise, of one size."""
    made = planted(1, sizes=(1024,), directions=("forward",))
    seconds = {"native": 1e-6, "reference": 4e-6, "compiled": 2e-6, "copy": 5e-7, "multiply": 1e-6}
    (case,) = made.cases
    timings = tuple(Timing(name, "forward", 1, (each,) * 11) for name, each in seconds.items())
    return replace(made, cases=(replace(case, timings=timings),))


def test_fractions_of_the_ceiling_follow_from_bytes_operations_and_rates(exact: Benchmark) -> None:
    (case,) = exact.cases
    moved = 8192 / 4e10  # bytes; the faster of the two copies around that size counts
    assert exact.bandwidth("cpu", 8192) == 4e10
    assert exact.floor_s(case, "forward") == pytest.approx(moved)
    assert exact.fraction(case, "native", "forward") == pytest.approx(moved / 1e-6)
    assert exact.fraction(case, "reference", "forward") == pytest.approx(moved / 4e-6)
    computing = replace(case, work=(replace(case.work[0], flops=10**6),))
    assert exact.floor_s(computing, "forward") == pytest.approx(1e6 / 1e11)
    uncounted = replace(case, work=(replace(case.work[0], flops=None),))
    assert exact.floor_s(uncounted, "forward") == pytest.approx(moved)
    assert exact.fraction(case, "nobody", "forward") is None
    assert exact.floor_s(case, "backward") is None
    assert replace(exact, ceilings=()).floor_s(case, "forward") is None


def test_the_rate_of_a_copy_is_that_of_its_size(exact: Benchmark) -> None:
    assert exact.bandwidth("cpu", 100) == 5e9
    assert exact.bandwidth("cpu", 1 << 20) == 4e10
    assert exact.bandwidth("cpu", 1 << 30) == 1e10
    assert exact.bandwidth("cuda", 100) is None
    assert (exact.multiplication("cpu", "float32"), exact.multiplication("cpu", "float64")) == (1e11, None)


def test_the_table_has_the_fastest_first_and_everything_beside_it(exact: Benchmark) -> None:
    lines = str(exact).splitlines()
    assert lines[0] == "demo::op: 2 threads, a processor, torch 2.13.0"
    assert lines[1:3] == [
        "  cpu copies 40.0 GB/s of 262 kB; 10.0 GB/s of 268 MB",
        "  cpu multiplies matrices at 100 GFLOP/s in float32",
    ]
    assert lines[4] == "N=1024; float32, cpu"
    assert lines[5].split() == ["median", "±", "×", "reference", "GB/s", "GFLOP/s", "roof"]
    assert [line.split() for line in lines[6:9]] == [
        ["forward", "native", "1.00", "µs", "±0%", "0.25", "(0.25–0.25)", "8.19", "20.5", "20%"],
        ["compiled", "2.00", "µs", "±0%", "0.50", "(0.50–0.50)", "4.10", "10.2", "10%"],
        ["reference", "4.00", "µs", "±0%", "1", "2.05", "5.12", "5.1%"],
    ]
    assert lines[9:15] == [
        "  to do: forward 8.19 kB and 20.5 kFLOP",
        "  native: keeps 4.10 kB for the backward (0 B without its arguments), peak 4.19 MB",
        "  reference: keeps 4.10 kB for the backward (4.10 kB without its arguments), peak under 1 MiB",
        "  compiled: compiled in 3.25 s, which the times above do not include",
        "  NOT TIMED: other: it computes something else: its shape",
        "  a note",
    ]
    assert lines[-1] == "sizes grown from sample 0"


@pytest.mark.parametrize(("count", "confidence"), [(3, "75%"), (5, "94%"), (6, None)])
def test_intervals_of_few_rounds_name_their_confidence(
    count: int, confidence: str | None, exact: Benchmark
) -> None:
    (case,) = exact.cases
    few = replace(case, timings=tuple(replace(each, seconds=each.seconds[:count]) for each in case.timings))
    told = str(replace(exact, cases=(few, case)))
    assert f"the quartiles of the {count} to 11 rounds" in told
    assert "at 95% confidence unless a line says otherwise" in told
    words = f"forward: intervals of {confidence} confidence, because there was only time for {count} rounds"
    assert told.count(words) == (confidence is not None)
    assert told.count("there was only time") == (confidence is not None)


def test_the_time_that_it_took_is_told_with_its_parts(exact: Benchmark) -> None:
    spent = {"check": 2.5, "compilation": 3.26, "rounds": 8.0, "total": 20.0}
    assert (
        "took 20.0 s: check 2.5 s, compilation 3.3 s, rounds 8.0 s"
        in str(replace(exact, spent=spent)).splitlines()
    )
    assert not any(line.startswith("took") for line in str(replace(exact, spent={})).splitlines())


def test_the_tiny_call_is_told_in_copies_of_torch(exact: Benchmark) -> None:
    (case,) = exact.cases
    lines = str(replace(exact, cases=(replace(case, role="call"),))).splitlines()
    assert lines[5].split() == ["median", "±", "×", "reference", "×", "copy_"]
    assert lines[6].split()[-1] == "2.0"
    assert not any("to do" in line for line in lines)


def test_without_a_reference_nothing_is_said_to_be_as_long_as_it(exact: Benchmark) -> None:
    (case,) = exact.cases
    alone = replace(case, timings=case.timings[:1], work=(replace(case.work[0], flops=None),))
    line = str(replace(exact, cases=(alone,))).splitlines()[6]
    assert line.split()[5:] == ["–", "8.19", "–", "20%"]


def test_a_terminal_shows_the_same_and_the_verdict(exact: Benchmark) -> None:
    def shown(now: Benchmark, earlier: Benchmark | None = None) -> str:
        console = Console(file=io.StringIO(), width=100)
        console.print(rendered(now, None if earlier is None else now.against(earlier)))
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    text = shown(exact)
    for line in str(exact).splitlines():
        for word in line.split():
            assert word in text
    assert "SLOWER" in shown(planted(1, slowdown=2.0), planted(2))
    assert "NOT COMPARABLE" in shown(planted(1, threads=3), planted(2))
    assert "not slower" in shown(planted(1), planted(2))
    assert all(len(line.rstrip()) <= 80 for line in shown(exact).splitlines() if "µs" in line)


def test_without_rich_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rich.console", "rich.padding", "rich.table", "rich.text"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        errors.MissingExtraError, match="benchmarks in colour need the package `rich`"
    ) as raised:
        rendered(planted(1))
    assert "pip install '.[cli]'" in (raised.value.hint or "")


def test_units() -> None:
    assert [duration(each) for each in (12.5, 0.9996, 0.0999, 9.9996e-4, 1.5e-6, 3e-8)] == [
        "12.5 s", "1.00 s", "99.9 ms", "1.00 ms", "1.50 µs", "30.0 ns",
    ]  # fmt: skip
    assert [amount(each, "B") for each in (0, 999, 1000, 123456, 999_960_000)] == [
        "0 B", "999 B", "1.00 kB", "123 kB", "1.00 GB",
    ]  # fmt: skip
    assert [part(each) for each in (1.5, 0.1, 0.05)] == ["150%", "10%", "5.0%"]
