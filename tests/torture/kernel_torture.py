"""Run as a program: processes that build real kernels in one cache at once, are killed, or find it damaged.

Each call runs in a fork of a process that has torch imported and no kernel loaded. It ends with 0 after right
results, with 3 after an error of opsmith's, which it prints, and with 1 after anything else. Prints one JSON
object.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import opsmith
from opsmith.build.cache import MANIFEST, Cache, is_sound, parts_of
from opsmith.config import CACHE

PROCESSES, KILLS = 16, 50
RIGHT, REFUSED = 0, 3
NOBODY = 65534

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


def forked(call: Callable[[], None] = use) -> int:
    child = os.fork()
    if child == 0:
        os.setsid()
        try:
            call()
            os._exit(RIGHT)
        except opsmith.errors.OpsmithError as error:
            sys.stdout.write(f"{type(error).__name__}: {error}\n")
            sys.stdout.flush()
            os._exit(REFUSED)
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            sys.stderr.flush()
            os._exit(1)
    return child


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def together(cache: Path) -> dict[str, Any]:
    children = [forked() for _ in range(PROCESSES)]
    return {"statuses": [ended(child) for child in children], "entries": len(Cache(cache).entries())}


def killed(cache: Path) -> dict[str, Any]:
    """Kill a process that builds, alone or with its compiler, and see that the next one finds all right."""
    draw = random.Random(0)
    deaths, after = 0, []
    for turn in range(KILLS):
        child = forked()
        time.sleep(draw.uniform(0, 1.2))
        (os.killpg if turn % 2 else os.kill)(child, signal.SIGKILL)
        deaths += ended(child) == -signal.SIGKILL
        if draw.random() < 0.25:
            after.append(ended(forked()))
        if draw.random() < 0.5:
            Cache(cache).clear()
    after.append(ended(forked()))
    leftover = [path.name for path in cache.iterdir() if path.name.startswith(".")]
    return {"deaths": deaths, "after": after, "leftover": leftover, "entries": len(Cache(cache).entries())}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes() or b"\n")
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def corrupted(cache: Path) -> dict[str, Any]:
    """Damage each file of each entry: what runs then is right, and was built again."""
    found: dict[str, list[Any]] = {}
    assert ended(forked()) == RIGHT
    files = [path for entry in Cache(cache).entries() for path in sorted(entry.iterdir())]
    for path in files:
        for damage in (cut, flip, Path.unlink):
            if damage is not flip and path.name not in ("kernel.so", MANIFEST):
                continue  # each costs a build
            damage(path)
            assert not is_sound(path.parent, path.parent.name), path
            kind = parts_of(path.parent).get("kind", "?") if path.name != MANIFEST else "any"
            status = ended(forked())
            found.setdefault(f"{kind} {path.name}", []).append(
                [status, is_sound(path.parent, path.parent.name)]
            )
    return {"found": found, "files": len(files)}


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
            assert ended(forked()) == RIGHT
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
    status = ended(forked())
    return {"status": status, "entries": len(Cache(cache).entries()) if cache.exists() else 0}


if __name__ == "__main__":
    modes = {each.__name__: each for each in (together, killed, corrupted, read_only, once)}
    sys.stdout.write(json.dumps(modes[sys.argv[1]](Path(os.environ[CACHE]))) + "\n")
