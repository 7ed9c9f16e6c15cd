"""Run as a program: a person interrupts builds, loads, calls and reloads at random moments, as by Ctrl+C.

The same call, made again, is right, in the same process and in the next one. Prints one JSON object.
"""

from __future__ import annotations

import collections
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from children import RIGHT, adopt_orphans, ended, forked, orphans
from torch import Tensor

import opsmith
from opsmith.build.cache import Cache
from opsmith.config import CACHE

INTERRUPTIONS = 120
"""Interruptions of each kind of process."""
TEXT = """
void added(Contiguous<const float> x, Contiguous<float> y) {{
  for (int64_t i = 0; i < x.numel(); i++) y[i] = x[i] + {number};
}}
"""
X = torch.arange(5.0)


def declared(number: int) -> Any:
    @opsmith.operator("torture::added")
    def added(x: Tensor) -> Tensor:
        return x + number

    return added.kernel("cpu", cpp=TEXT.format(number=number), strict=True)


def interrupted(call: Callable[[], None], after_s: float) -> bool:
    """Call, and interrupt after some seconds; return whether the interrupt came back from the call."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        call()
    except KeyboardInterrupt:
        return True
    except RuntimeError as error:
        # Between C++ and a function of Python, torch keeps no exception but its own. An interrupt while torch
        # puts a mode back on its stack loses the mode, and the exit of the mode raises from the interrupt.
        by_torch = str(error) == "torch failed: torch_call_dispatcher"
        if not (by_torch or isinstance(error.__context__, KeyboardInterrupt)):
            raise
        return True
    finally:
        with suppress(KeyboardInterrupt):  # of an alarm that comes here, after the call
            signal.setitimer(signal.ITIMER_REAL, 0)
    return False


def right(number: int) -> Callable[[], None]:
    """Return a call whose kernel must run and be right, with a gradient and through the dispatcher."""

    def call() -> None:
        operator = declared(number)
        x = X.clone().requires_grad_()
        assert torch.equal(operator(x), X + number), operator(x)
        assert torch.equal(torch.ops.torture.added(X), X + number), torch.ops.torture.added(X)
        (gradient,) = torch.autograd.grad(operator(x).sum(), x)
        assert torch.equal(gradient, torch.ones(5)), gradient
        assert operator.explain(X).forward.startswith("kernel for cpu"), operator.explain(X)

    return call


def duration(call: Callable[[], None]) -> float:
    start = time.monotonic()
    assert ended(forked(call)) == RIGHT
    return time.monotonic() - start


def processes(cache: Path, draw: random.Random, kind: str) -> dict[str, Any]:
    """Interrupt processes that build, or that load what was built; each makes the same call again."""
    found: collections.Counter[str] = collections.Counter()
    limit_s = max(duration(right(number)) for number in ((-1, -2) if kind == "build" else (-1,)))
    for number in range(INTERRUPTIONS):
        text = number if kind == "build" else -1
        moment_s = draw.uniform(0, limit_s)

        def call(text: int = text, moment_s: float = moment_s) -> None:
            was_interrupted = interrupted(right(text), moment_s)
            right(text)()
            if not was_interrupted:
                os._exit(NOT_REACHED)

        status = ended(forked(call))
        found["interrupted"] += status == RIGHT
        found["ended before"] += status == NOT_REACHED
        found["wrong"] += status not in (RIGHT, NOT_REACHED)
        if number % 10 == 0:
            found["wrong after"] += ended(forked(right(text))) != RIGHT
    leftover = [path.name for path in cache.iterdir() if path.name.startswith(".")]
    unsealed = len(leftover) + len(orphans())
    return {
        **{name: found[name] for name in ("interrupted", "ended before", "wrong", "wrong after")},
        "left": unsealed,
    }


NOT_REACHED = 7
"""Status of a process whose call ended before the interrupt."""


def same_process(draw: random.Random) -> dict[str, int]:
    """Interrupt calls and replacements of kernels in one process, which goes on."""
    found: collections.Counter[str] = collections.Counter()
    numbers = (1, 2, 3)
    for number in numbers:
        right(number)()
    for _ in range(10 * INTERRUPTIONS):
        number = draw.choice(numbers)
        found["interrupted"] += interrupted(right(number), draw.uniform(1e-6, 4e-3))
        try:
            right(number)()
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            found["wrong"] += 1
    return {"interrupted": found["interrupted"], "wrong": found["wrong"]}


def main(cache: Path) -> dict[str, Any]:
    adopt_orphans()
    right(0)()  # an import that is interrupted leaves half a module, whoever wrote it
    draw = random.Random(0)
    figures: dict[str, Any] = {kind: processes(cache, draw, kind) for kind in ("build", "load")}
    figures["entries"] = len(Cache(cache).entries()) > INTERRUPTIONS // 2
    return {**figures, "same process": same_process(draw)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(os.environ[CACHE]))) + "\n")
