"""Make a release: version, changelog, checked builds, the site, a commit and a tag. Nothing is published.

    make release VERSION=0.11.0

What cannot be released is refused before anything is written. Where a step fails, the files are as
before, and there is neither a commit nor a tag. Exit status: 0 released, 1 refused or failed, 2 usage.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from datetime import UTC, date, datetime
from pathlib import Path

CHANGELOG = Path("CHANGELOG.md")
MODULE = Path("src/opsmith/__init__.py")
UNRELEASED = "## [Unreleased]\n"

_VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
_HEADING = re.compile(r"^## \[(\d+\.\d+\.\d+)\]", re.MULTILINE)
_ASSIGNED = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)


class ReleaseError(Exception):
    """A release that is not made; the message says why, and what to do."""


def number(version: str) -> tuple[int, ...]:
    """The numbers of a version, by which versions are ordered."""
    return tuple(map(int, version.split(".")))


def run(*command: str) -> str:
    """Run a program, and return what it prints. Raises CalledProcessError if it fails."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def unreleased(changelog: str) -> str:
    """The text of the section of what is not released yet, empty if nothing is in it."""
    _, heading, rest = changelog.partition(UNRELEASED)
    if not heading:
        raise ReleaseError(
            f"{CHANGELOG} has no line `{UNRELEASED.strip()}`: write it above the newest version"
        )
    return re.split(r"^## ", rest, maxsplit=1, flags=re.MULTILINE)[0].strip()


def refuse(version: str, changelog: str) -> None:
    """Raise ReleaseError if this version cannot be released from this tree."""
    if not _VERSION.fullmatch(version):
        raise ReleaseError(f"VERSION={version} is no version: write three numbers, as VERSION=0.11.0")
    if changed := run("git", "status", "--porcelain").rstrip():
        raise ReleaseError(f"these changes are not committed: commit them, or take them back\n{changed}")
    released = _HEADING.findall(changelog)
    newest = max(released, key=number, default=version)
    if version in released or run("git", "tag", "--list", f"v{version}"):
        raise ReleaseError(f"version {version} exists: choose a number after {newest}")
    if number(version) < number(newest):
        raise ReleaseError(f"version {version} is older than {newest}: choose a number after {newest}")
    said, where = unreleased(changelog), f"[Unreleased] in {CHANGELOG}"
    if not said:
        raise ReleaseError(f"{where} is empty: write what changed for users, and commit it")
    if said.startswith(("#", "-")):
        raise ReleaseError(f"{where} must begin with a sentence about the whole version: write it")


def release(version: str, day: date) -> None:
    """Write the version into both files, build and check, then commit and tag."""
    changelog, module = CHANGELOG.read_text(encoding="utf-8"), MODULE.read_text(encoding="utf-8")
    refuse(version, changelog)
    assigned, count = _ASSIGNED.subn(f'__version__ = "{version}"', module)
    if count != 1:
        raise ReleaseError(f'{MODULE} must have one line `__version__ = "X.Y.Z"`, not {count}: write it so')
    dated = changelog.replace(UNRELEASED, f"{UNRELEASED}\n## [{version}] - {day}\n", 1)
    CHANGELOG.write_text(dated, encoding="utf-8")
    MODULE.write_text(assigned, encoding="utf-8")
    message = f"Version {version}"
    steps = (
        ("make", "dist"),
        ("make", "dist-check"),
        ("make", "docs"),
        ("git", "commit", "--quiet", "--message", message, str(CHANGELOG), str(MODULE)),
        ("git", "tag", "--annotate", "--message", message, f"v{version}"),
    )
    try:
        for step in steps:
            subprocess.run(step, check=True)
    except BaseException as error:  # on Ctrl-C, too
        CHANGELOG.write_text(changelog, encoding="utf-8")
        MODULE.write_text(module, encoding="utf-8")
        if run("git", "log", "-1", "--format=%s").strip() == message:
            run("git", "reset", "--quiet", "HEAD~1")
        if not isinstance(error, subprocess.CalledProcessError):
            raise
        failed = " ".join(error.cmd[:2])
        raise ReleaseError(f"`{failed}` failed: correct its error, and make the release again") from error


def main() -> int:
    """Make the release of the command line, and return the exit status."""
    parser = argparse.ArgumentParser(prog="make release", description="Make a release; nothing is published.")
    parser.add_argument("version", metavar="VERSION=X.Y.Z", help="the new version, as VERSION=0.11.0")
    parser.add_argument(
        "--date", type=date.fromisoformat, default=datetime.now(UTC).date(), help="by default today"
    )
    args = parser.parse_args()
    try:
        release(args.version, args.date)
    except ReleaseError as refused:
        print(f"release: {refused}", file=sys.stderr)
        return 1
    print(f"Version {args.version} is committed and tagged. To publish it: git push --follow-tags")
    return 0


if __name__ == "__main__":
    sys.exit(main())
