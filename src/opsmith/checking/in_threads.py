"""Calls in several threads at once, in step: each waits before each of torch's operations for the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from opsmith.torch_library import capabilities

LONGEST = 60.0
"""Seconds after which a thread that waits for the others to begin a stage gives up."""

STEP = 0.2
"""Seconds after which a thread goes on alone: another one has fewer operations, or waits for its lock."""

STEPS = 200
"""Operations of a stage that are done in step."""


def at_once(stages: Sequence[Sequence[Callable[[Any], Any]]], *, in_step: bool) -> list[Any]:
    """Run several jobs, each in a thread of its own; all threads begin each stage together.

    Args:
        stages: For each thread what it does, one stage after the other; each takes what the one before gave.
        in_step: Whether all threads do each operation of torch together, so that what they share gets mixed.

    Returns:
        What each thread's last stage gave, or what it raised; None where another's exception stopped it.

    Example:
        >>> stages = [lambda _: 1, lambda one: one + 1], [lambda _: 5, lambda five: -five]
        >>> at_once(stages, in_step=False)
        [2, -5]
    """
    answers: list[Any] = [None] * len(stages)
    begin = threading.Barrier(len(stages))
    steps = [threading.Barrier(len(stages)) for _ in stages[0]]

    def work(at: int) -> None:
        value: Any = None
        try:
            for stage, step in zip(stages[at], steps, strict=True):
                begin.wait(LONGEST)
                with capabilities.watching(_waiting(step)) if in_step else nullcontext():
                    value = stage(value)
                step.abort()  # whoever has more operations does them alone
            answers[at] = value
        except threading.BrokenBarrierError:
            return
        except (Exception, SystemExit) as error:  # a thread that exits would let the others wait
            answers[at] = error
            begin.abort()
            for step in steps:
                step.abort()

    threads = [threading.Thread(target=work, args=(at,), daemon=True) for at in range(len(stages))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def _waiting(step: threading.Barrier) -> Callable[[Any, dict[str, Any]], None]:
    done = 0

    def wait(operator: Any, kwargs: dict[str, Any]) -> None:
        nonlocal done
        done += 1
        if done > STEPS or step.broken:
            return
        try:
            step.wait(STEP)
        except threading.BrokenBarrierError:
            return

    return wait
