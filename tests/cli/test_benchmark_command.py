"""`opsmith benchmark`: what it prints and writes, its exit statuses, and every way to use it wrongly."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from opsmith.benchmarking import Benchmark, effort, machine
from opsmith.benchmarking import timing as clock
from opsmith.benchmarking.result import Timing
from opsmith.checking import Outcome, Report

SOURCE = """
import torch, opsmith
from torch import Tensor

@opsmith.operator("{space}::twice", shapes="x: N -> N")
def twice(x: Tensor, by: int = 2) -> Tensor:
    return x * by

twice.samples(lambda make: [(make(4),)])

@opsmith.operator("{space}::square", shapes="x: N -> N")
def square(x: Tensor) -> Tensor:
    return x * x

square.samples(lambda make: [(make(4),)])

@opsmith.operator("{space}::wrong")
def wrong(x: Tensor) -> Tensor:
    return x * x

wrong.gradients(x=lambda grad, x: -2 * grad * x)
wrong.samples(lambda make: [(make(3),)])

@opsmith.operator("{space}::bare")
def bare(x: Tensor) -> Tensor:
    return x + x

@opsmith.operator("{space}::seldom", shapes="x: N -> N")
def seldom(x: Tensor) -> Tensor:
    return x + 1

seldom.kernel("cpu", lambda x: x + 1 if x.numel() < 100 else x + 2)
seldom.samples(lambda make: [(make(5),)])

def added(x, by=2):
    return sum([x] * by)

def shifted(x, by=2):
    return x + 1

SAMPLES = [(torch.ones(7),)]

def of_n(make, n):
    return [(make(n),)]
"""

BRIEF = ("--quick", "--no-compiled")


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SIDES", {"cpu": 32})
    monkeypatch.setattr(machine, "FOOTPRINTS", (1 << 12, 1 << 16))
    monkeypatch.setattr(machine, "TURN_S", 1e-5)
    monkeypatch.setattr(clock, "PAUSE_S", 1e-5)
    monkeypatch.setattr(gc, "collect", lambda generation=2: 0)
    brief = replace(effort.EFFORTS["quick"], elements=(256,), least=3, most=3, turn_s=1e-5)
    monkeypatch.setattr(effort, "EFFORTS", {**effort.EFFORTS, "quick": brief})


@pytest.fixture(autouse=True)
def _checked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every operator for right, but where a test is about what a check finds."""
    if "really_checked" in request.fixturenames:
        return
    ok = (Outcome("forward", "passed"), Outcome("gradient", "passed"))
    monkeypatch.setattr(
        "opsmith.benchmarking.benchmarker.check", lambda operator, **options: Report(operator.name, ok, 0)
    )


@pytest.fixture
def really_checked() -> None:
    """Each operator is checked, as it is for users."""


@pytest.fixture
def file(write: Callable[..., Path]) -> Path:
    return write(SOURCE)


@pytest.fixture
def run(opsmith: Callable[..., Result]) -> Callable[..., Result]:
    return lambda *arguments: opsmith("benchmark", *BRIEF, *arguments)


Run = Callable[..., Result]


def test_an_operator_beside_its_reference_a_baseline_and_the_ceilings(
    run: Run, file: Path, space: str
) -> None:
    done = run(
        f"{file}:twice", "--baseline", "added", "--baseline", "shifted", "--size", "N=8,16", "--threads", "1"
    )
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{space}::twice: 1 thread, ")
    assert any(line.startswith("  cpu copies ") for line in lines[1:3])  # behind a long name
    for title in ("a call, x [4], by=2; float32, cpu", "N=8; float32, cpu", "N=16; float32, cpu"):
        assert title in done.stdout
    assert "roof" in done.stdout
    assert "NOT TIMED: shifted: it computes something else: its result: at [0]" in done.stdout
    assert done.stdout.count("added") >= 9


@pytest.mark.slow
def test_json_is_all_of_it_and_the_file_the_same(run: Run, file: Path, tmp_path: Path, space: str) -> None:
    out = tmp_path / "out.json"
    done = run(
        f"{file}:twice", "--json", "-o", str(out), "--size", "N=8", "--size", "by=3", "--dtype", "float64",
        "--dtype", "bfloat16", "--direction", "forward", "--seed", "5",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert json.loads(out.read_text()) == told
    assert (told["schema"], told["verdicts"], told["unmeasured"]) == (2, [], [])
    made = Benchmark.from_json(done.stdout)
    assert (made.operator, made.seed, made.effort) == (f"{space}::twice", 5, "quick")
    assert [case.dtype for case in made.cases if case.role == "size"] == ["float64", "bfloat16"]
    assert made.cases[1].arguments == ("x [8]", "by=3")
    assert made.cases[0].directions == ("forward",)


def slowed(file: Path, by: float) -> None:
    """Make an earlier benchmark out of one, in which the operator took so many times as long."""
    told = json.loads(file.read_text())
    made = Benchmark.from_json(json.dumps(told))
    cases = []
    for case in made.cases:
        timings = tuple(
            Timing(
                each.contender,
                each.direction,
                each.calls,
                tuple(second * (by if each.contender == "operator" else 1.0) for second in each.seconds),
            )
            for each in case.timings
        )
        cases.append(replace(case, timings=timings))
    told["benchmarks"] = [replace(made, cases=tuple(cases)).to_dict()]
    file.write_text(json.dumps(told))


@pytest.fixture
def earlier(run: Run, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A benchmark of `twice` in a file, its times drawn up; from now on the same times are measured again."""
    path = tmp_path / "before.json"
    done = run(f"{file}:twice", "-o", str(path), "--size", "N=8")
    assert done.exit_code == 0, done.output
    told = json.loads(path.read_text())
    for case in told["benchmarks"][0]["cases"]:
        for timing in case["timings"]:
            timing["seconds"] = [1e-3, 1.01e-3, 1.02e-3]
    path.write_text(json.dumps(told))
    made = Benchmark.from_json(json.dumps(told))
    monkeypatch.setattr("opsmith.benchmarking.benchmark", lambda operator, **options: made)
    return path


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("by", "status", "says"),
    [(1.0, 0, "::twice: not slower"), (0.01, 1, "::twice: SLOWER in 6 of 6 rows"), (100.0, 0, "faster")],
    ids=["same", "slower", "faster"],
)
def test_against_an_earlier_one(
    run: Run, file: Path, earlier: Path, by: float, status: int, says: str
) -> None:
    slowed(earlier, by)
    done = run(f"{file}:twice", "--against", str(earlier))
    assert (done.exit_code, says in done.stdout) == (status, True), done.output
    told = json.loads(run(f"{file}:twice", "--against", str(earlier), "--json").stdout)
    assert told["verdicts"][0]["passed"] is (status == 0)


@pytest.mark.slow
def test_an_operator_that_the_earlier_one_lacks_is_told(
    run: Run, file: Path, earlier: Path, space: str
) -> None:
    done = run(str(file), "--against", str(earlier))
    told = [name for name in ("twice", "square", "wrong", "bare", "seldom") if f"::{name}`" in done.stderr]
    assert told == ["square", "wrong", "bare", "seldom"]
    assert f"opsmith: `{earlier}` does not have `{space}::square`: nothing to compare with" in done.stderr


@pytest.mark.slow
def test_what_one_benchmark_wrote_alone_can_be_compared_with(run: Run, file: Path, earlier: Path) -> None:
    earlier.write_text(json.dumps(json.loads(earlier.read_text())["benchmarks"][0]))
    assert run(f"{file}:twice", "--against", str(earlier)).exit_code == 0


@pytest.mark.slow
def test_tolerance_is_handed_on(run: Run, file: Path, earlier: Path) -> None:
    slowed(earlier, 0.01)
    assert run(f"{file}:twice", "--against", str(earlier), "--tolerance", "1e9").exit_code == 0
    done = run(f"{file}:twice", "--against", str(earlier), "--tolerance", "-1")
    assert (done.exit_code, "the tolerance must be a fraction" in done.stderr) == (2, True)


def test_one_from_another_machine_has_status_2_and_says_so(run: Run, file: Path, earlier: Path) -> None:
    told = json.loads(earlier.read_text())
    told["benchmarks"][0]["environment"]["processor"] = "an abacus"
    earlier.write_text(json.dumps(told))
    done = run(f"{file}:twice", "--against", str(earlier))
    assert done.exit_code == 2
    assert "NOT COMPARABLE: processor was an abacus" in done.stdout


@pytest.mark.slow
def test_pictures_are_written_for_each_operator(run: Run, file: Path, tmp_path: Path) -> None:
    done = run(f"{file}:twice", "--plot", str(tmp_path / "one.svg"))
    assert done.exit_code == 0, done.output
    assert {each.name for each in tmp_path.glob("one*")} == {"one-roofline.svg", "one-scaling.svg"}
    assert "opsmith: a picture is in " in done.stderr


@pytest.mark.usefixtures("really_checked")
def test_one_that_fails_its_check_has_status_1_and_one_without_samples_2(
    run: Run, file: Path, tmp_path: Path, space: str
) -> None:
    done = run(f"{file}:wrong")
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"opsmith: {space}::wrong: it fails its check" in done.stderr
    done = run(f"{file}:bare", "--json")
    assert done.exit_code == 2
    assert "there are no samples to measure it on" in done.stderr
    (unmeasured,) = json.loads(done.stdout)["unmeasured"]
    assert unmeasured["operator"] == f"{space}::bare"


@pytest.mark.slow
def test_one_that_is_wrong_at_a_larger_size_has_status_1(run: Run, file: Path) -> None:
    done = run(f"{file}:seldom")
    assert done.exit_code == 1
    assert "NOT TIMED: native: it computes something else" in done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("really_checked")
def test_all_operators_of_a_file_are_measured_though_some_cannot_be(
    run: Run, write: Callable[..., Path], tmp_path: Path
) -> None:
    source = SOURCE.replace("seldom.samples(", "_ = (")
    file = write(source.replace('seldom", shapes="x: N -> N"', 'seldom"'))
    done = run(str(file), "--plot", str(tmp_path / "all.svg"))
    assert done.exit_code == 2, done.output
    names = {each.name for each in tmp_path.glob("all*")}
    assert names == {
        f"all-{name}-{kind}.svg" for name in ("twice", "square") for kind in ("roofline", "scaling")
    }
    assert done.stderr.count("there are no samples to measure it on") == 2


@pytest.mark.slow
def test_samples_that_are_named(run: Run, file: Path) -> None:
    done = run(f"{file}:bare", "--samples", "SAMPLES", "--json")
    assert done.exit_code == 0, done.output
    (made,) = json.loads(done.stdout)["benchmarks"]
    assert [case["arguments"] for case in made["cases"]] == [["x [7]"], ["x [7]"]]
    done = run(f"{file}:bare", "--samples", f"{file}:of_n", "--size", "n=5,6", "--json")
    (made,) = json.loads(done.stdout)["benchmarks"]
    assert [case["label"] for case in made["cases"]] == ["n=5", "n=6"]


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--thorough",), "`--quick` and `--thorough` contradict each other"),
        (("--size", "N"), "`N` names no sizes"),
        (("--size", "=3"), "`=3` names no sizes"),
        (("--size", "N=3.5"), "`N=3.5` names no sizes"),
        (("--size", "N=3,"), "`N=3,` names no sizes"),
        (("--size", "N=²"), "`N=²` names no sizes"),
        (("--size", "N=" + "9" * 5000), "names no sizes"),
        (("--size", "N=3", "--size", "by N=4"), "`by N=4` names a size that was given before"),
        (("--tolerance", "nan"), "the tolerance must be a fraction"),
        (("--size", "Q=3"), "there is no size `Q`"),
        (("--dtype", "int64"), "`int64` must be a floating dtype"),
        (("--dtype", "complex64"), "`complex64` must be a floating dtype"),
        (("--dtype", "float33"), "`float33` must be a floating dtype"),
        (("--direction", "up"), "`--direction` must be directions"),
        (("--device", "gpu"), "is not a device type that torch knows"),
        (("--device", "meta"), "nothing can be timed on the device `meta` here"),
        (("--threads", "0"), "the number of threads must be positive"),
        (("--samples", "absent"), "has nothing named `absent`"),
        (("--baseline", "absent"), "has nothing named `absent`"),
        (("--baseline", "SAMPLES"), "baselines must be functions by name"),
        (("-o", "none/out.json"), "no file can be written to `none/out.json`"),
        (("--plot", "none/out.svg"), "no file can be written to `none/out.svg`"),
        (("--plot", "out.gif"), "the format of the picture is not supported"),
        (("--against", "none.json"), "`none.json` cannot be read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_usage_errors_have_status_2_and_print_no_report(
    run: Run, file: Path, more: tuple[str, ...], says: str
) -> None:
    done = run(f"{file}:twice", *more)
    assert done.exit_code == 2, done.output
    assert says in done.stderr
    assert done.stdout == ""


def test_samples_and_baselines_are_for_one_operator(run: Run, file: Path, space: str) -> None:
    for option in ("--samples", "--baseline"):
        done = run(str(file), option, "SAMPLES")
        assert done.exit_code == 2
        assert f"`{option}` is for one operator, but `{file}` has 5" in done.stderr
        assert f"opsmith benchmark {file}:{space}::twice {option} SAMPLES" in done.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("not json", "is not a benchmark that this version of opsmith wrote"),
        ("{}", "is not a benchmark that this version of opsmith wrote"),
        ('{"benchmarks": []}', "is not a benchmark that this version of opsmith wrote"),
        ('{"benchmarks": [3]}', "is not a benchmark that this version of opsmith wrote"),
        ("\udcff", "is not a benchmark that this version of opsmith wrote"),
    ],
)
def test_files_that_are_no_benchmark(run: Run, file: Path, tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "before.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    done = run(f"{file}:twice", "--against", str(path))
    assert (done.exit_code, done.stdout) == (2, "")
    assert says in done.stderr


def test_a_file_about_other_operators(run: Run, file: Path, earlier: Path, space: str) -> None:
    done = run(f"{file}:square", "--against", str(earlier))
    assert (done.exit_code, done.stdout) == (2, "")
    assert "has no benchmark of these operators" in done.stderr
    assert f"got: `{space}::twice`" in done.stderr


def test_without_matplotlib_nothing_is_measured(
    run: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "opsmith.benchmarking.plotting", raising=False)
    for name in [each for each in sys.modules if each.partition(".")[0] == "matplotlib"] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    done = run(f"{file}:twice", "--plot", "out.svg")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "pip install '.[benchmark]'" in done.stderr


def test_an_error_within_says_where_it_comes_from_if_asked(run: Run, file: Path) -> None:
    done = run(f"{file}:absent", "--traceback")
    assert done.exit_code == 2
    assert "Traceback" in done.stderr


def test_the_file_that_was_full_keeps_what_was_printed(
    run: Run, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, *args: Any, **kwargs: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    done = run(f"{file}:twice", "-o", str(tmp_path / "out.json"))
    assert done.exit_code == 2
    assert "no file can be written to" in done.stderr
    assert "No space left on device" in done.stderr
    assert "a call, x [4]" in done.stdout
