"""The build of the site fails where a page or a docstring is wrong, and names it."""

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
