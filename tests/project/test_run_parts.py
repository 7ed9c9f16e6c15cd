"""`ci/run_parts.py`: the parts that run, what becomes of their processes, the closing table."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from opsmith.torch_library.capabilities.capability import TESTED

ROOT = Path(__file__).resolve().parents[2]
RUN_PARTS = ROOT / "ci" / "run_parts.py"


@dataclass(frozen=True)
class Witness:
    """A named pipe that processes hold open while they live; their numbers would outlive them, as zombies."""

    path: Path
    reader: int

    def saw_them_start_and_die(self) -> bool:
        started = os.read(self.reader, 100) == b"started\n"
        os.set_blocking(self.reader, True)
        return started and os.read(self.reader, 1) == b""  # returns once nobody holds it open


def run_parts(parts: str, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    table = tmp_path / "parts.toml"
    table.write_text(parts)
    command = [sys.executable, str(RUN_PARTS), "--parts", str(table), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def part(name: str, command: str, suites: str = "test") -> str:
    return f"[{name}]\nsuites = {suites.split(', ')}\ncommand = '''{command}'''\n"


def row(output: str, name: str) -> list[str]:
    """The words of a part's row in the closing table."""
    return next(line.split() for line in reversed(output.splitlines()) if line.startswith(f"{name} "))


@pytest.fixture
def witness(tmp_path: Path) -> Iterator[Witness]:
    path = tmp_path / "witness"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield Witness(path, reader)
    os.close(reader)


def test_parts_that_pass_are_listed_with_their_time(tmp_path: Path) -> None:
    done = run_parts(part("lint", "echo clean") + part("unit", "true"), tmp_path, "test")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nclean\n" in done.stdout
    for name in ("lint", "unit"):
        _, seconds, unit, verdict = row(done.stdout, name)
        assert (seconds.isdigit(), unit, verdict) == (True, "s", "passed")
    assert "suite test: passed in" in done.stdout


def test_children_that_a_part_leaves_behind_are_killed(tmp_path: Path, witness: Witness) -> None:
    command = f"exec 9> {witness.path}; echo started >&9; sleep infinity &"
    done = run_parts(part("untidy", command), tmp_path, "test")
    assert done.returncode == 0
    assert witness.saw_them_start_and_die()


def test_a_part_that_fails_fails_the_suite_and_the_others_still_run(tmp_path: Path) -> None:
    done = run_parts(part("bad", "exit 3") + part("good", "echo still here"), tmp_path, "test")
    assert done.returncode == 1
    assert row(done.stdout, "bad")[-3:] == ["FAILED,", "status", "3"]
    assert "\nstill here\n" in done.stdout
    assert row(done.stdout, "good")[-1] == "passed"
    assert "suite test: FAILED: bad in" in done.stdout


def test_closing_lines_of_pytest_end_the_output_and_are_added_up(tmp_path: Path) -> None:
    one = "===== 1 failed, 3 passed, 2 errors in 1.25s ====="
    two = "===== 4 passed, 1 error in 61.00s (0:01:01) ====="
    parts = part("one", f"echo '{one}'; exit 1") + part("lint", "echo ok") + part("two", f"echo '{two}'")
    done = run_parts(parts, tmp_path, "test")
    ending = done.stdout.splitlines()[-6:]
    assert ending[:5] == ["one:", one, "two:", two, "all tests: 1 failed, 7 passed, 3 error(s)"]


def test_only_the_parts_of_the_named_suite_run(tmp_path: Path) -> None:
    parts = part("both", "echo in both", suites="test, test-all")
    parts += part("more", "echo more", suites="test-all")
    assert "echo more" not in run_parts(parts, tmp_path, "test").stdout
    assert "echo more" in run_parts(parts, tmp_path, "test-all").stdout
    assert "echo in both" not in run_parts(parts, tmp_path, "test-all", "--only", "more").stdout


def test_a_part_left_out_is_said_to_be(tmp_path: Path) -> None:
    done = run_parts(part("one", "true") + part("two", "exit 1"), tmp_path, "test", "--without", "two")
    assert done.returncode == 0
    assert row(done.stdout, "two")[-4:] == ["left", "out,", "as", "asked"]


def test_every_part_gets_one_thread_and_a_fresh_cache_for_compiled_code(tmp_path: Path) -> None:
    command = "echo threads=$OMP_NUM_THREADS cache=$TORCHINDUCTOR_CACHE_DIR"
    lines = []
    for _ in range(2):
        output = run_parts(part("env", command), tmp_path, "test").stdout
        lines.append(next(line for line in output.splitlines() if line.startswith("threads=")))
    assert all(line.startswith("threads=1 cache=") and "opsmith-suite-" in line for line in lines)
    assert lines[0] != lines[1]


LINT = part("lint", "true")
INCOMPLETE = "part 'lint' must have suites and command, and nothing else"


@pytest.mark.parametrize(
    ("parts", "arguments", "message"),
    [
        (LINT, ["tset"], "there is no suite named 'tset'; there is: test"),
        (LINT, ["test", "--only", "lnt"], "there is no part of test named 'lnt'; there is: lint"),
        (LINT, ["test", "--without", "x"], "there is no part of test named 'x'; there is: lint"),
        ("[lint]\nsuites = ['test']\n", ["test"], INCOMPLETE),
        (LINT + "workers = 2\n", ["test"], INCOMPLETE),
        ("[lint", ["test"], "Expected"),
    ],
    ids=["suite", "only", "without", "missing-key", "unknown-key", "not-toml"],
)
def test_usage_errors_say_what_there_is(
    parts: str, arguments: list[str], message: str, tmp_path: Path
) -> None:
    done = run_parts(parts, tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""


def test_every_part_of_test_is_in_test_all() -> None:
    parts = tomllib.loads((ROOT / "ci" / "parts.toml").read_text())
    alone = [name for name, entry in parts.items() if "test-all" not in entry["suites"]]
    # The slow programs of pages are in slow-rest; a browser is not on every machine.
    assert alone == ["programs", "site", "browser"]


def test_every_torch_that_is_pinned_has_a_part_and_a_size() -> None:
    pinned = sorted(path.stem for path in (ROOT / "requirements").glob("torch-*.txt"))
    parts = tomllib.loads((ROOT / "ci" / "parts.toml").read_text())
    assert [name for name in parts if name.startswith("torch-")] == pinned
    contributing, readme = (ROOT / "CONTRIBUTING.md").read_text(), (ROOT / "README.md").read_text()
    for name in pinned:
        version = name.removeprefix("torch-")
        requirements = (ROOT / "requirements" / f"{name}.txt").read_text()
        assert f"\ntorch=={version}." in requirements
        (size,) = re.findall(r"\d+ GB", requirements)
        (row,) = re.findall(rf"^\| `{name}` \|.*$", contributing, re.MULTILINE)
        assert size in row
        assert parts[name]["command"].startswith(f".venv-{name}/bin/python ")
    pin = re.search(r"^torch==(\d+\.\d+)\.", (ROOT / "requirements" / "dev.txt").read_text(), re.MULTILINE)
    assert pin is not None
    others = [name.removeprefix("torch-") for name in pinned]
    assert tuple(sorted([pin[1], *others])) == TESTED
    sentence = re.search(
        rf"tested on the CPU with torch {pin[1]}, and by `make test-all` with ([\d., and]*)", readme
    )
    assert sentence is not None
    assert re.findall(r"\d+\.\d+", sentence[1]) == others
