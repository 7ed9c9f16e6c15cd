"""The runtime under ThreadSanitizer: threads call an operator whose kernel another thread reloads."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from opsmith import errors
from opsmith.build.toolchain import find_toolchain
from opsmith.kernels.cpp.compiler import HEADER
from opsmith.kernels.runtime.library import RUNTIME, RUNTIME_HEADERS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="C++ kernels are built on Linux"),
]

PROGRAM = Path(__file__).with_name("reload_races.cpp")
FLAGS = ("-std=c++17", "-O1", "-g", "-fsanitize=thread")
RELOADS = 500
LIMIT_S = 900
RACE = "WARNING: ThreadSanitizer: data race"


def compiled(source: Path, folder: Path) -> tuple[Path | None, str]:
    """Return a program under ThreadSanitizer, or None and the compiler's errors."""
    program = folder / source.stem
    command = [*find_toolchain().command, *FLAGS, f"-I{folder}", str(source), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (program if done.returncode == 0 else None), done.stderr


def run(program: Path, *arguments: int) -> subprocess.CompletedProcess[str]:
    command = [str(program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the runtime; skips the test where ThreadSanitizer does not run."""
    made = tmp_path_factory.mktemp("races")
    (made / "empty.cpp").write_text("int main() {}\n")
    try:
        program, printed = compiled(made / "empty.cpp", made)
    except errors.ToolchainError as error:
        pytest.skip(f"there is no compiler: {error.problem}")
    if program is None:
        pytest.skip(f"the compiler has no ThreadSanitizer: {printed.strip()}")
    done = run(program)
    if done.returncode != 0:
        pytest.skip(f"ThreadSanitizer does not run on this system: {done.stderr.strip()}")
    for path in (HEADER, RUNTIME, *RUNTIME_HEADERS):
        shutil.copy(path, made)
    return made


@pytest.fixture(scope="module")
def races(folder: Path) -> Path:
    program, printed = compiled(PROGRAM, folder)
    assert program is not None, printed
    return program


@pytest.mark.parametrize("kernels", [1, 3])
def test_a_reload_under_calls_of_other_threads_has_no_data_race(races: Path, kernels: int) -> None:
    done = run(races, RELOADS, kernels)
    assert RACE not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures.pop("calls") > RELOADS
    assert figures == {"reloads": RELOADS, "failed": 0, "replaced": 0, "tensors": 0}


ATOMIC = "std::atomic<Record*> record{nullptr};"
PLAIN = """struct {
    Record* plain = nullptr;
    Record* load() { return plain; }
    void operator=(Record* record) { plain = record; }
    void compare_exchange_strong(Record*, Record* record) { plain = record; }
  } record;"""


def mutant(folder: Path, tmp_path: Path, file: str, right: str, wrong: str) -> Path:
    copied = tmp_path / "mutant"
    shutil.copytree(folder, copied)
    text = (copied / file).read_text()
    assert text.count(right) == 1
    (copied / file).write_text(text.replace(right, wrong))
    program, printed = compiled(PROGRAM, copied)
    assert program is not None, printed
    return program


def test_an_exchange_that_is_not_atomic_is_found(folder: Path, tmp_path: Path) -> None:
    program = mutant(folder, tmp_path, "runtime.cpp", ATOMIC, PLAIN)
    assert RACE in run(program, RELOADS, 3).stderr


def test_a_plan_of_what_was_there_before_is_found(folder: Path, tmp_path: Path) -> None:
    program = mutant(
        folder, tmp_path, "plan.h", "if (generation != generation_) return;", "(void)generation;"
    )
    figures = json.loads(run(program, 4 * RELOADS, 3).stdout)
    assert figures["replaced"] > 0
