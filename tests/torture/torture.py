"""Run as a program: many processes use one cache at once, or are killed in the middle of a build.

It forks from a process that has opsmith imported and nothing else running, which a test's process has not.
Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from opsmith.build.cache import Cache

PROCESSES, KEYS, KILLS = 16, 6, 50
SIZE = 200_000
"""Bytes of each library: some pages, so that a kill can come between them."""


def content(key: int) -> bytes:
    return bytes([key]) * SIZE


def build_of(key: int, log: Path) -> Callable[[Path], None]:
    """Write a library in pieces with pauses between them, and then say so in the log."""

    def build(directory: Path) -> None:
        for name in ("library.so", "other.so"):
            with (directory / name).open("wb") as file:
                for at in range(0, SIZE, SIZE // 4):
                    file.write(content(key)[at : at + SIZE // 4])
                    file.flush()
                    time.sleep(0.0005)
        with log.open("a") as file:
            file.write(f"{key}\n")

    return build


def use(directory: Path, log: Path, seed: int) -> None:
    """Obtain every key in an order of one's own; fail unless each is right."""
    keys = list(range(KEYS))
    random.Random(seed).shuffle(keys)
    for key in keys:
        entry = Cache(directory, wait_s=1500).obtain({"key": str(key)}, build_of(key, log))
        assert entry.source in ("built", "disk"), entry
        for name in ("library.so", "other.so"):
            assert (entry.directory / name).read_bytes() == content(key), entry


def forked(call: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            call()
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    return child


def together(directory: Path, log: Path) -> dict[str, object]:
    children = [forked(lambda seed=seed: use(directory, log, seed)) for seed in range(PROCESSES)]  # type: ignore[misc]
    statuses = [os.waitpid(child, 0)[1] for child in children]
    return {"statuses": statuses, "builds": log.read_text().split()}


def killed(directory: Path, log: Path) -> dict[str, object]:
    draw = random.Random(0)
    deaths = 0

    def until_killed() -> None:
        while True:
            use(directory, log, draw.randrange(1000))
            Cache(directory).clear()

    for _ in range(KILLS):
        child = forked(until_killed)
        time.sleep(draw.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        deaths += os.WIFSIGNALED(status)
        if draw.random() < 0.5:
            use(directory, log, 0)  # whatever the dead one has left
            Cache(directory).clear()
    use(directory, log, 0)
    leftover = [path.name for path in directory.iterdir() if path.name.startswith(".")]
    return {"killed": deaths, "leftover": leftover, "entries": len(Cache(directory).entries())}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        mode = {"together": together, "killed": killed}[sys.argv[1]]
        sys.stdout.write(json.dumps(mode(Path(scratch) / "cache", Path(scratch) / "log")))
