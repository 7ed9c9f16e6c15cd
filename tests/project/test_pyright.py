"""pyright, where it is installed, agrees with mypy about code as users write it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("pyright", reason="pyright is not installed")


def _pyright(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_it_finds_the_wrong_calls_and_no_others() -> None:
    found = _pyright()
    assert found.returncode == 0, found.stdout + found.stderr
    assert "0 errors" in found.stdout


def test_a_wrong_type_would_be_found(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        (ROOT / "tests" / "typing" / "user_code.py")
        .read_text()
        .replace("assert_type(norm(x), Tensor)", "assert_type(norm(x), int)")
        .replace("linear(x)  # type: ignore[call-arg]", "linear(x)")
    )
    settings = (
        (ROOT / "pyproject.toml").read_text().replace('extraPaths = ["src"', f'extraPaths = ["{ROOT}/src"')
    )
    (tmp_path / "pyproject.toml").write_text(settings.replace("tests/typing", "."))
    found = _pyright("--project", str(tmp_path))
    assert found.returncode == 1, found.stdout + found.stderr
    assert '"assert_type" mismatch: expected "int" but received "Tensor"' in found.stdout
    assert 'Argument missing for parameter "weight"' in found.stdout
