"""What became slower since another commit: figures of both, in turns, beside the noise of each.

A round runs each benchmark once with the source of this tree, and once with that of the commit, which is
checked out into a folder of its own: ratios of calls (`overhead.py`), milliseconds of imports
(`import_time.py`), and seconds of quick checks (`checks.py`). The scripts are those of this tree. A figure is
slower where its median is more than a tenth above the other's, and its least value above the greatest of the
other: beyond what either did by itself. The exit status is 0 whatever it says; 2 if there is no such commit.

    python benchmarks/compare.py                     # with the newest tag, else the commit before
    python benchmarks/compare.py --with 1a2b3c4 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHARE = 1.1
"""Ratio of medians below which nothing is called slower or faster."""
SCRIPTS: dict[str, tuple[str, ...]] = {
    "overhead.py": ("--json", "--without-cpp", "--rounds", "9", "--calls", "100"),
    "import_time.py": ("--json", "--rounds", "3"),
    "checks.py": ("--json", "--quick", "--rounds", "1"),
}

Samples = Mapping[str, Sequence[float]]


def verdict(before: Sequence[float], now: Sequence[float]) -> str:
    """Say whether figures became greater or smaller beyond their own spread.

    Example:
        >>> verdict([1.0, 1.1, 1.2], [1.5, 1.4, 1.6])
        'slower'
        >>> verdict([1.0, 1.1, 1.5], [1.5, 1.4, 1.6])
        ''
    """
    first, second = statistics.median(before), statistics.median(now)
    if second > SHARE * first and min(now) > max(before):
        return "slower"
    if first > SHARE * second and max(now) < min(before):
        return "faster"
    return ""


def table(before: Samples, now: Samples) -> list[str]:
    """Lines of the report: each figure before and now, with its spread, and what changed."""
    lines = [f"{'':64}{'before':>22}{'now':>22}{'now / before':>14}"]
    for name in [*now, *(each for each in before if each not in now)]:
        cells = []
        for samples in (before.get(name), now.get(name)):
            if samples:
                low, high = min(samples), max(samples)
                cells.append(f"{statistics.median(samples):8.2f} ({low:.2f}-{high:.2f})")
            else:
                cells.append("not there")
        changed = ""
        if name in before and name in now:
            ratio = statistics.median(now[name]) / statistics.median(before[name])
            changed = f"{ratio:14.2f}  {verdict(before[name], now[name])}"
        lines.append(f"{name:64}{cells[0]:>22}{cells[1]:>22}{changed}".rstrip())
    return lines


def figures(script: str, tree: Path) -> dict[str, float]:
    """The figures of a benchmark, run with the source of a tree; none where that cannot run it."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / script), *SCRIPTS[script]],
        env={**os.environ, "PYTHONPATH": str(tree / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        print(f"compare: {script} does not run with {tree.name}: {''.join(last)}", file=sys.stderr)
        return {}
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {f"{script.removesuffix('.py')}: {name}": value for name, value in found.items()}


def build_calls(tree: Path) -> None:
    """Compile the calls in C++ of a tree's source into the cache, as `make setup` does."""
    done = subprocess.run(
        [sys.executable, "-m", "opsmith", "build", "--calls"],
        env={**os.environ, "PYTHONPATH": str(tree / "src")},
        capture_output=True,
        check=False,
    )
    if done.returncode:
        print(f"compare: {tree.name} makes its calls in Python", file=sys.stderr)


def collect(trees: Sequence[Path], scripts: Iterable[str], rounds: int) -> list[Samples]:
    """The figures of each tree, which take turns, and begin in turns."""
    found: list[dict[str, list[float]]] = [defaultdict(list) for _ in trees]
    for number in range(rounds):
        for script in scripts:
            places = range(len(trees)) if number % 2 == 0 else reversed(range(len(trees)))
            for place in places:
                for name, value in figures(script, trees[place]).items():
                    found[place][name].append(value)
            print(f"compare: round {number + 1} of {rounds}, {script}", file=sys.stderr, flush=True)
    return list(found)


def git(*arguments: str) -> str:
    """What git prints; empty where it fails, as for a tag that is not there."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--with", dest="commit", default="", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=list(SCRIPTS), help="these alone")
    given = parser.parse_args()
    wanted = given.commit or git("describe", "--tags", "--abbrev=0") or "HEAD~1"
    commit = git("rev-parse", "--verify", "--quiet", f"{wanted}^{{commit}}")
    if not commit:
        print(f"compare: there is no commit {wanted!r} here: name one by --with COMMIT", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / commit[:9]
        git("worktree", "add", "--detach", str(other), commit)
        try:
            for tree in (other, ROOT):
                build_calls(tree)
            before, now = collect([other, ROOT], given.only, given.rounds)
        finally:
            git("worktree", "remove", "--force", str(other))
    title = git("log", "-1", "--format=%h %s", commit)
    print(f"this tree beside {title}; {given.rounds} rounds; smaller is faster")
    print("\n".join(table(before, now)))
    slower = [name for name in now if name in before and verdict(before[name], now[name]) == "slower"]
    print(f"slower beyond the noise: {', '.join(slower) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
