"""Run as a program: processes that build real kernels in one cache at once, are killed, or find it damaged.

Each call runs in a fork of a process that has torch imported and no kernel loaded. Prints one JSON object.
"""

from __future__ import annotations

import collections
import json
import os
import random
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from children import NOBODY, RIGHT, adopt_orphans, ended, forked, import_modules_of, orphans
from torch import Tensor

import opsmith
from opsmith.build.cache import Cache, is_sound
from opsmith.build.dependencies import INDEX
from opsmith.config import CACHE

PROCESSES, KILLS, DAMAGES = 32, 60, 300

TEXT = """
void times_{factor}(Contiguous<const float, 1> x, Contiguous<float, 1> y) {{
  for (int64_t i = 0; i < x.size(0); i++) y[i] = x[i] * {factor};
}}
"""


def declared(factor: int) -> Any:
    def times(x: Tensor) -> Tensor:
        return x * factor

    times.__qualname__ = f"times_{factor}"
    operator = opsmith.operator(f"torture::times_{factor}")(times)
    return operator.kernel("cpu", cpp=TEXT.format(factor=factor))


OPERATORS = {factor: declared(factor) for factor in (2, 3)}


def use() -> None:
    """Call every operator; fail unless its kernel ran and each result is right."""
    for factor, operator in OPERATORS.items():
        x = torch.arange(5.0)
        assert operator.explain(x).forward.startswith("kernel for cpu"), operator.explain(x)
        result = operator(x)
        assert torch.equal(result, x * factor), (factor, result)


def together(cache: Path) -> dict[str, Any]:
    children = [forked(use) for _ in range(PROCESSES)]
    return {"statuses": [ended(child) for child in children], "entries": len(Cache(cache).entries())}


def killed(cache: Path) -> dict[str, Any]:
    """Kill processes that build or load, alone or with their compiler, until enough have died of it."""
    adopt_orphans()
    draw = random.Random(0)
    seconds = {}
    for kind in ("build", "load"):
        start = time.monotonic()
        assert ended(forked(use)) == RIGHT
        seconds[kind] = time.monotonic() - start
    deaths = {"build": 0, "load": 0}
    after, running = [], []
    while sum(deaths.values()) < KILLS:
        entries = Cache(cache).entries()
        removed = draw.sample(entries, draw.randrange(len(entries) + 1))
        for entry in removed:
            shutil.rmtree(entry)
        kind = "build" if removed or not entries else "load"
        child = forked(use)
        time.sleep(draw.uniform(0, seconds[kind] * max(len(removed), 1) / len(OPERATORS)) / 2)
        with suppress(ProcessLookupError):  # it leads no group yet
            draw.choice((os.kill, os.killpg))(child, signal.SIGKILL)
        status = ended(child)
        running += orphans()
        if status == -signal.SIGKILL:
            deaths[kind] += 1
        else:
            after.append(status)
        if draw.random() < 0.25:
            after.append(ended(forked(use)))
    after.append(ended(forked(use)))
    leftover = [path.name for path in cache.iterdir() if path.name.startswith(".")]
    entries = Cache(cache).entries()
    return {
        "deaths": deaths,
        "after": after,
        "running": running,
        "leftover": leftover,
        "entries": len(entries),
    }


def cut(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size or 1)])


def lengthen(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randrange(1, 9000)))


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes() or b"\n")
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def shuffle(path: Path, draw: random.Random) -> None:
    path.write_bytes(draw.randbytes(path.stat().st_size + 1))


def unlink(path: Path, _: random.Random) -> None:
    path.unlink()


def link(path: Path, _: random.Random) -> None:
    """Put a link in its place that leads to the same content."""
    path.rename(path.parents[1] / f".{path.name}")
    path.symlink_to(path.parents[1] / f".{path.name}")


def directory(path: Path, _: random.Random) -> None:
    path.unlink()
    path.mkdir()


def open_to_all(path: Path, _: random.Random) -> None:
    path.chmod(0o666)


DAMAGES_OF_A_FILE = (cut, lengthen, flip, shuffle, unlink, link, directory, open_to_all)


def damaged(cache: Path) -> dict[str, Any]:
    """Damage one file of the cache, again and again: what runs then is right, and was built again."""
    draw = random.Random(0)
    figures: dict[str, collections.Counter[str]] = {"damages": collections.Counter()}
    figures["files"], figures["wrong"] = collections.Counter(), collections.Counter()
    assert ended(forked(use)) == RIGHT
    for _ in range(DAMAGES):
        entries = Cache(cache).entries()
        folder = draw.choice([*entries, cache / INDEX])
        path = draw.choice(
            [each for each in sorted(folder.iterdir()) if each.is_file() and each.stat().st_size]
        )
        damage = draw.choice(DAMAGES_OF_A_FILE)
        damage(path, draw)
        figures["damages"][damage.__name__] += 1
        figures["files"]["index" if folder.name == INDEX else path.name] += 1
        seen = folder.name == INDEX or not is_sound(folder, folder.name)
        right = ended(forked(use)) == RIGHT and Cache(cache).entries() == entries
        figures["wrong"][f"{path.name} {damage.__name__}"] += not (seen and right)
    return {**figures, "wrong": {name: count for name, count in figures["wrong"].items() if count}}


def read_only(cache: Path) -> dict[str, Any]:
    """In a read-only cache, entries are used, and what is missing is built for the process alone."""

    def call() -> None:
        if os.geteuid() == 0:
            os.setuid(NOBODY)
        try:
            (cache / "new").write_text("")
        except PermissionError:
            use()
            return
        raise AssertionError("it can be written")

    statuses = []
    for full in (True, False):
        if full:
            import_modules_of(use)
        else:
            Cache(cache).clear()
        if os.geteuid() == 0:
            for path in (cache, *cache.rglob("*")):
                os.chown(path, NOBODY, NOBODY)
        cache.chmod(0o500)
        statuses.append(ended(forked(call)))
        cache.chmod(0o700)
        if os.geteuid() == 0:
            for path in (cache, *cache.rglob("*")):
                os.chown(path, 0, 0)
    return {"statuses": statuses, "entries": len(Cache(cache).entries())}


def once(cache: Path) -> dict[str, Any]:
    """One process, on whatever disk the cache is."""
    status = ended(forked(use))
    return {"status": status, "entries": len(Cache(cache).entries()) if cache.exists() else 0}


if __name__ == "__main__":
    modes = {each.__name__: each for each in (together, killed, damaged, read_only, once)}
    sys.stdout.write(json.dumps(modes[sys.argv[1]](Path(os.environ[CACHE]))) + "\n")
