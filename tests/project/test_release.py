"""`make release`, in a repository of its own, where `make` builds nothing: what it writes and refuses."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = """
dist:
\t@grep -q '^__version__ = "0.11.0"$$' src/opsmith/__init__.py && echo dist >> .git/made
dist-check:
\t@echo dist-check >> .git/made
docs:
\t@echo docs >> .git/made
"""
SENTENCE = "Operators may be drawn on glass."
CHANGELOG = f"""# Changelog

## [Unreleased]

{SENTENCE}

### Added
- A line.

## [0.10.0] - 2026-11-30

What was before.

### Added
- Another line.
"""


class Repository:
    """A repository with the files that a release reads, all committed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "ci", folder / "ci", ignore=shutil.ignore_patterns("__pycache__"))
        self.write("CHANGELOG.md", CHANGELOG)
        self.write("Makefile", MAKEFILE)
        self.write("src/opsmith/__init__.py", '"""A package."""\n\n__version__ = "0.10.0"\n')
        self.git("init", "--quiet", "--initial-branch=main")
        self.commit()

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        names = {
            f"GIT_{who}_{what}": "somebody" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
        }
        quiet = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        outer = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "MAKE"))}
        env = outer | names | quiet
        return subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True)

    def git(self, *arguments: str) -> str:
        done = self.run("git", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "Something")

    def release(self, version: str = "0.11.0") -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-B", "ci/release.py", version, "--date", "2027-01-02")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


def refusal(repository: Repository, version: str = "0.11.0") -> str:
    """What a release says that is refused, and changes nothing."""
    before = (
        repository.git("rev-parse", "HEAD"),
        repository.git("status", "--porcelain"),
        repository.git("tag"),
    )
    done = repository.release(version)
    after = (
        repository.git("rev-parse", "HEAD"),
        repository.git("status", "--porcelain"),
        repository.git("tag"),
    )
    assert (done.returncode, done.stdout, after) == (1, "", before)
    return done.stderr.rpartition("release: ")[2].strip()  # before it stands what `make` and git print


def test_a_release_is_built_checked_committed_and_tagged(repository: Repository) -> None:
    done = repository.release()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("0.11.0 is committed and tagged. To publish it: git push --follow-tags\n")
    assert repository.read(".git/made").split() == ["dist", "dist-check", "docs"]
    assert repository.read("src/opsmith/__init__.py") == '"""A package."""\n\n__version__ = "0.11.0"\n'
    assert f"## [Unreleased]\n\n## [0.11.0] - 2027-01-02\n\n{SENTENCE}\n" in repository.read("CHANGELOG.md")
    assert repository.git("log", "-1", "--format=%s", "v0.11.0") == "Version 0.11.0"
    assert repository.git("cat-file", "-t", "v0.11.0") == "tag"
    assert repository.git("status", "--porcelain") == ""


def test_a_second_release_needs_new_lines(repository: Repository) -> None:
    assert repository.release().returncode == 0
    assert refusal(repository) == "version 0.11.0 exists: choose a number after 0.11.0"
    empty = "[Unreleased] in CHANGELOG.md is empty: write what changed for users, and commit it"
    assert refusal(repository, "0.11.1") == empty


@pytest.mark.parametrize("version", ["0.11", "v0.11.0", "0.11.0rc1", "0.011.0"])
def test_a_version_is_three_numbers(repository: Repository, version: str) -> None:
    expected = f"VERSION={version} is no version: write three numbers, as VERSION=0.11.0"
    assert refusal(repository, version) == expected


def test_a_version_must_be_given(repository: Repository) -> None:
    done = repository.run(sys.executable, "ci/release.py")
    assert done.returncode == 2
    assert "the following arguments are required: VERSION=X.Y.Z" in done.stderr


def test_changes_that_are_not_committed_are_named(repository: Repository) -> None:
    repository.write("README.md", "new")
    expected = "these changes are not committed: commit them, or take them back\n?? README.md"
    assert refusal(repository) == expected


def test_a_version_with_a_tag_exists(repository: Repository) -> None:
    repository.git("tag", "v0.11.0")
    assert refusal(repository) == "version 0.11.0 exists: choose a number after 0.10.0"


def test_a_version_comes_after_all_others(repository: Repository) -> None:
    assert refusal(repository, "0.9.9") == "version 0.9.9 is older than 0.10.0: choose a number after 0.10.0"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("## [Unreleased]\n\n", "", "has no line `## [Unreleased]`: write it above the newest version"),
        (f"{SENTENCE}\n\n", "", "must begin with a sentence about the whole version: write it"),
    ],
    ids=["no-section", "no-sentence"],
)
def test_the_changelog_says_what_is_released(repository: Repository, old: str, new: str, said: str) -> None:
    assert old in CHANGELOG
    repository.write("CHANGELOG.md", CHANGELOG.replace(old, new))
    repository.commit()
    assert said in refusal(repository)


@pytest.mark.parametrize("step", ["dist", "dist-check", "docs"])
def test_where_a_step_fails_the_files_are_as_before(repository: Repository, step: str) -> None:
    repository.write("Makefile", re.sub(rf"(?m)^{step}:\n.*$", f"{step}:\n\t@exit 3", MAKEFILE))
    repository.commit()
    expected = f"`make {step}` failed: correct its error, and make the release again"
    assert refusal(repository) == expected


def test_where_git_refuses_the_commit_the_files_are_as_before(repository: Repository) -> None:
    repository.write(".git/hooks/pre-commit", "#!/bin/sh\nexit 1\n")
    (repository.folder / ".git/hooks/pre-commit").chmod(0o755)
    expected = "`git commit` failed: correct its error, and make the release again"
    assert refusal(repository) == expected


def test_where_git_refuses_the_tag_there_is_no_commit(repository: Repository) -> None:
    repository.git("config", "tag.gpgSign", "true")
    repository.git("config", "gpg.program", "false")
    assert refusal(repository) == "`git tag` failed: correct its error, and make the release again"
    repository.git("config", "tag.gpgSign", "false")
    assert repository.release().returncode == 0


@pytest.mark.parametrize(
    ("line", "count"), [("__version__ = '0.10.0'\n", 0), ('__version__ = "0.10.0"\n' * 2, 2)]
)
def test_the_version_is_written_in_one_line(repository: Repository, line: str, count: int) -> None:
    repository.write("src/opsmith/__init__.py", line)
    repository.commit()
    expected = f'src/opsmith/__init__.py must have one line `__version__ = "X.Y.Z"`, not {count}: write it so'
    assert refusal(repository) == expected
