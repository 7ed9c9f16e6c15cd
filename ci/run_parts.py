"""Run a suite of ci/parts.toml, one part at a time, and print a table of times and verdicts.

    python ci/run_parts.py test
    python ci/run_parts.py test --only lint types
    python ci/run_parts.py test-all --without torch-2.11

A part has as much time as it needs: a test that hangs ends by pytest's own limit (pyproject.toml).
Exit status: 0 every part passed, 1 a part failed, 2 usage. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).resolve().parent.parent
KEPT = 4096  # bytes of a part's last output, in which pytest's closing line is looked for
CLOSING_LINE = re.compile(r"^=+ (?P<counts>.+) in \d+\.\d+s.* =+$", re.MULTILINE)


@dataclass(frozen=True)
class Part:
    name: str
    suites: tuple[str, ...]
    command: str


@dataclass(frozen=True)
class Outcome:
    part: Part
    verdict: str
    good: bool
    seconds: float = 0.0
    closing_line: re.Match[str] | None = None


def read_parts(path: Path) -> list[Part]:
    """Read the table of parts. Raises ValueError if a part lacks a key or has an unknown one."""
    parts = []
    for name, entry in tomllib.loads(path.read_text(encoding="utf-8")).items():
        match entry:
            case {"suites": list(suites), "command": str(command), **rest} if not rest:
                parts.append(Part(name, tuple(suites), command))
            case _:
                raise ValueError(f"{path}: part {name!r} must have suites and command, and nothing else")
    return parts


def choose(parts: Sequence[Part], suite: str, only: Sequence[str], without: Sequence[str]) -> list[Part]:
    """Select the suite's parts, or those of them in `only`. Raises ValueError for an unknown name."""
    _require("suite", [suite], {name for part in parts for name in part.suites})
    members = [part for part in parts if suite in part.suites]
    _require(f"part of {suite}", [*only, *without], [part.name for part in members])
    return [part for part in members if not only or part.name in only]


def _require(what: str, wanted: Iterable[str], known: Iterable[str]) -> None:
    for name in wanted:
        if name not in known:
            raise ValueError(f"there is no {what} named {name!r}; there is: {', '.join(sorted(known))}")


def environment(scratch: str) -> dict[str, str]:
    """Environment variables of every part."""
    programs = str(Path(sys.executable).parent)
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {
        **inherited,
        "PYTHONPYCACHEPREFIX": str(ROOT / "build" / "bytecode"),  # no program compiles opsmith's source again
        "PATH": os.pathsep.join([programs, os.environ.get("PATH", os.defpath)]),
        "OMP_NUM_THREADS": "1",  # pytest has a process per core; more threads would wait for each other
        "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor",  # new in each run: no stale entry hides a fault
        "OPSMITH_CACHE": str(ROOT / "build" / "kernels"),  # its keys hold all that a kernel is made of
    }


def run(part: Part, env: dict[str, str]) -> Outcome:
    """Run a part in a process group of its own, and kill what the part leaves behind."""
    print(f"\n--- {part.name}: {part.command}", flush=True)
    start = time.monotonic()
    process = subprocess.Popen(
        ["bash", "-c", part.command],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    kept = bytearray()
    echo = threading.Thread(target=_echo, args=(process.stdout, kept), daemon=True)
    echo.start()
    try:
        status = process.wait()
        verdict = "passed" if status == 0 else f"FAILED, status {status}"
    finally:  # on Ctrl-C too
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    seconds = time.monotonic() - start
    echo.join(timeout=5)
    closing_lines = list(CLOSING_LINE.finditer(kept.decode(errors="replace")))
    return Outcome(part, verdict, verdict == "passed", seconds, closing_lines[-1] if closing_lines else None)


def _echo(source: BinaryIO, kept: bytearray) -> None:
    while chunk := os.read(source.fileno(), 65536):
        sys.stdout.buffer.write(chunk)
        sys.stdout.flush()
        kept += chunk
        del kept[:-KEPT]


def table(outcomes: Sequence[Outcome]) -> str:
    """Time and verdict of each part, then the closing lines of pytest."""
    width = max(len(outcome.part.name) for outcome in outcomes)
    rows = [f"{'part':<{width}}    taken  verdict"]
    closing_lines: list[str] = []
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        name = outcome.part.name
        rows.append(f"{name:<{width}}  {outcome.seconds:>5.0f} s  {outcome.verdict}")
        if outcome.closing_line:
            closing_lines += [f"{name}:", outcome.closing_line[0]]
            for number, word in re.findall(r"(\d+) (\w+)", outcome.closing_line["counts"]):
                counts["error(s)" if word.startswith("error") else word] += int(number)
    if counts:
        closing_lines.append("all tests: " + ", ".join(f"{number} {word}" for word, number in counts.items()))
    return "\n".join(rows + closing_lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a suite's parts, one at a time.")
    parser.add_argument("suite")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="run these parts alone")
    parser.add_argument("--without", nargs="+", default=[], metavar="PART", help="leave these parts out")
    parser.add_argument("--parts", type=Path, default=ROOT / "ci" / "parts.toml", metavar="FILE")
    args = parser.parse_args()
    try:
        parts = choose(read_parts(args.parts), args.suite, args.only, args.without)
    except (OSError, ValueError) as error:
        parser.error(str(error))

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` above is reached then as well
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="opsmith-suite-", ignore_cleanup_errors=True) as scratch:
        env = environment(scratch)
        outcomes = [
            Outcome(part, "left out, as asked", good=True) if part.name in args.without else run(part, env)
            for part in parts
        ]
    failed = [outcome.part.name for outcome in outcomes if not outcome.good]
    verdict = f"FAILED: {', '.join(failed)}" if failed else "passed"
    print(f"\n{table(outcomes)}\nsuite {args.suite}: {verdict} in {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
