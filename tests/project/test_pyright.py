"""pyright, which the part `types` runs beside mypy, finds a wrong type in code as users write it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("pyright", reason="pyright is not installed, as in the environments of other torches")


@pytest.mark.slow  # the part `types` runs pyright on the right code
def test_a_wrong_type_is_found(tmp_path: Path) -> None:
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
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--project", str(tmp_path)]
    bundled = os.environ | {"PYRIGHT_PYTHON_USE_BUNDLED_PYRIGHT": "1"}
    found = subprocess.run(command, cwd=ROOT, env=bundled, capture_output=True, text=True, check=False)
    assert found.returncode == 1, found.stdout + found.stderr
    assert '"assert_type" mismatch: expected "int" but received "Tensor"' in found.stdout
    assert 'Argument missing for parameter "weight"' in found.stdout
