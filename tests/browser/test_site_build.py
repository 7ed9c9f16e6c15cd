"""The build of the site: a wrong page or docstring fails it and is named; notebooks become pages."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser  # as the site: it needs the environment that `make test-browser` sets up

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-docs" / "bin" / "python"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the project, to damage."""
    others = shutil.ignore_patterns(".*", "out", "build", "dist", "__pycache__")
    return shutil.copytree(ROOT, tmp_path / "copy", ignore=others)


def refused(copy: Path) -> str:
    done = subprocess.run(
        [PYTHON, copy / "docs" / "site" / "build.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout
    return done.stdout + done.stderr


def damage(path: Path, before: str, after: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert before in text
    path.write_text(text.replace(before, after, 1), encoding="utf-8")


def test_a_public_name_without_a_docstring_is_named(copy: Path) -> None:
    text = copy / "src" / "opsmith" / "testing" / "__init__.py"
    damage(text, '    """Assert that an operator passes', '    text = """Assert that an operator passes')
    assert "opsmith.testing.assert_correct" in refused(copy)


@pytest.mark.parametrize("link", ["nowhere.md", "checking.md#no-such-heading"])
def test_a_dead_link_is_named(copy: Path, link: str) -> None:
    damage(copy / "docs" / "why.md", "## One declaration", f"[dead]({link})\n\n## One declaration")
    said = refused(copy)
    assert "why.md" in said
    assert link in said


def test_a_notebook_has_a_button_for_colab_where_the_repository_is_known() -> None:
    program = """
import build
path = build.ROOT / "examples/notebooks/adopt_a_file.ipynb"
print("Colab" in build.shown(path))
build.SETTINGS["repo_url"] = "https://github.com/someone/opsmith"
print(build.shown(path))
"""
    folder = ROOT / "docs" / "site"
    done = subprocess.run([PYTHON, "-c", program], cwd=folder, capture_output=True, text=True, check=True)
    without, title, *lines = done.stdout.split("\n")
    assert (without, title) == ("False", "# Adopt a file")
    notebook = "github/someone/opsmith/blob/main/examples/notebooks/adopt_a_file.ipynb"
    assert f"[Open in Colab](https://colab.research.google.com/{notebook}){{ .md-button }}" in lines
    assert "%pip install 'opsmith[all] @ git+https://github.com/someone/opsmith'" in lines
