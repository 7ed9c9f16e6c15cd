"""`make bench-compare`: what is slower than at another commit, beyond its own noise."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "compare.py"


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    specification = importlib.util.spec_from_file_location("bench_compare", FILE)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ([1.0, 1.1, 1.2], [1.5, 1.6, 1.7], "slower"),
        ([1.5, 1.6, 1.7], [1.0, 1.1, 1.2], "faster"),
        ([1.0, 1.1, 1.6], [1.5, 1.6, 1.7], ""),  # one round before was as slow
        ([1.00, 1.01, 1.02], [1.05, 1.06, 1.07], ""),  # apart, and too little to matter
    ],
)
def test_a_change_counts_beyond_the_spread_of_both(
    compare: ModuleType, before: list[float], now: list[float], said: str
) -> None:
    assert compare.verdict(before, now) == said


def test_the_table_has_each_figure_of_either(compare: ModuleType) -> None:
    lines = compare.table({"gone": [1.0], "kept": [1.0, 1.2]}, {"kept": [2.0, 2.4], "new": [3.0]})
    assert [line.split()[0] for line in lines[1:]] == ["kept", "new", "gone"]
    assert lines[1].split() == ["kept", "1.10", "(1.00-1.20)", "2.20", "(2.00-2.40)", "2.00", "slower"]
    assert lines[2].split() == ["new", "not", "there", "3.00", "(3.00-3.00)"]


def test_trees_take_turns_and_the_scripts_are_those_of_this_tree(
    compare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run(
        command: list[str], *, env: dict[str, str], **options: object
    ) -> subprocess.CompletedProcess[str]:
        tree = Path(env["PYTHONPATH"]).parent.name
        ran.append(f"{Path(command[3]).name} {tree}")
        assert Path(command[3]).parent == FILE.parent
        if tree == "old" and "checks" in command[3]:
            return subprocess.CompletedProcess(command, 1, "", "Traceback\nAttributeError: no such name\n")
        return subprocess.CompletedProcess(command, 0, "a warning\n" + json.dumps({"a": 1.0}) + "\n", "")

    monkeypatch.setattr(compare.subprocess, "run", run)
    before, now = compare.collect([tmp_path / "old", tmp_path / "new"], ["overhead.py", "checks.py"], 2)
    assert ran == [
        *("overhead.py old", "overhead.py new", "checks.py old", "checks.py new"),
        *("overhead.py new", "overhead.py old", "checks.py new", "checks.py old"),
    ]
    assert before == {"overhead: a": [1.0, 1.0]}
    assert now == {"overhead: a": [1.0, 1.0], "checks: a": [1.0, 1.0]}
    assert "checks.py does not run with old: AttributeError: no such name" in capsys.readouterr().err


def test_a_commit_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "compare.py").write_text(FILE.read_text())
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    command = [sys.executable, "benchmarks/compare.py", "--with", "nowhere"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "compare: there is no commit 'nowhere' here: name one by --with COMMIT" in done.stderr


def test_the_benchmarks_take_the_options_that_they_are_given(compare: ModuleType) -> None:
    for script, options in compare.SCRIPTS.items():
        text = (FILE.parent / script).read_text()
        assert all(f'"{option}"' in text for option in options if option.startswith("--")), script
