"""Workflows of GitHub call targets of `make` and actions of a pinned version; actionlint reads them there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
OTHERS = {f"test-{path.stem}" for path in (ROOT / "requirements").glob("torch-*.txt")}


def called(workflow: Path) -> set[str]:
    """Targets of `make` that a workflow calls, by the names in its matrix, too."""
    text = workflow.read_text(encoding="utf-8")
    matrix = re.findall(r"^ +suite: \[(.+)\]$", text, re.MULTILINE)
    words = [word for line in re.findall(r"run: make (.+)$", text, re.MULTILINE) for word in line.split()]
    return {word for word in words if re.fullmatch(r"[a-z-]+", word)} | {
        name for names in matrix for name in names.split(", ")
    }


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_each_target_of_make_exists(workflow: Path) -> None:
    assert called(workflow) <= TARGETS | OTHERS


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_major_version(workflow: Path) -> None:
    used = re.findall(r"uses: (\S+)", workflow.read_text(encoding="utf-8"))
    assert used
    for action in used:
        assert re.search(r"^\./|@(release/)?v\d+$|^docker://[^:]+:\d+\.\d+\.\d+$", action), action


def test_each_torch_is_tested() -> None:
    assert called(ROOT / ".github" / "workflows" / "tests.yml") == {"test", *OTHERS}
