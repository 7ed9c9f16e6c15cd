"""Run as a program: a process with busy threads forks at random moments, and each child works.

The threads build, replace, call and differentiate meanwhile, so that locks are held at the moment of a fork.
Prints one JSON object.
"""

from __future__ import annotations

import collections
import json
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from children import RIGHT, ended, forked
from torch import Tensor

import opsmith

FORKS = 150
TEXT = """
void {name}(Contiguous<const float> x, Contiguous<float> y) {{
  for (int64_t i = 0; i < x.numel(); i++) y[i] = x[i] + {number};
}}
"""
X = torch.arange(5.0)


def declared(name: str, number: int) -> Any:
    def added(x: Tensor) -> Tensor:
        return x + number

    added.__qualname__ = name
    operator = opsmith.operator(f"torture::{name}")(added)
    return operator.kernel("cpu", cpp=TEXT.format(name=name, number=number), entry=name, strict=True)


class Busy:
    """Threads that do something again and again."""

    def __init__(self, *work: Callable[[int], object]) -> None:
        self.rounds: collections.Counter[str] = collections.Counter()
        self.errors: list[str] = []
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._repeat, args=(each,)) for each in work]

    def __enter__(self) -> Busy:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _repeat(self, work: Callable[[int], object]) -> None:
        number = 0
        while not self._stopped.is_set():
            number += 1
            try:
                work(number)
            except Exception as error:
                self.errors.append(f"{work.__name__}: {type(error).__name__}: {error}")
                return
            self.rounds[work.__name__] += 1


def build(number: int) -> None:
    """Build a kernel that nobody has built."""
    assert torch.equal(declared("built", number)(X), X + number)


def replace(number: int) -> None:
    """Replace a kernel by one of three that were built before."""
    declared("replaced", number % 3)


def plan(number: int) -> None:
    """Call with sizes and dtypes for which there is no plan."""
    called(torch.zeros(number % 50 + 1))
    x = torch.zeros(number % 7 + 1, 2, requires_grad=True)
    torch.autograd.grad(called(x).sum(), x)


def declare(number: int) -> None:
    """Declare an operator anew, and ask for what is made when it is first needed."""
    operator = declared(f"new_{number % 20}", 1)
    operator.explain(X)
    torch.func.vmap(operator.reference)(X)


called = declared("called", 1)


def in_child(number: int) -> Callable[[], None]:
    """Return the work of a child: everything that takes a lock, twice."""

    def work() -> None:
        for _ in range(2):
            assert torch.equal(called(X), X + 1)
            x = X.clone().requires_grad_()
            torch.autograd.grad(called(x).sum(), x)
            operator = declared("replaced", number % 3)
            assert torch.equal(operator(X), X + number % 3)
            assert torch.equal(operator.reload()(X), X + number % 3)
            assert torch.equal(declared(f"child_{number % 5}", 5)(X), X + 5)
            assert torch.equal(torch.func.vmap(called)(X), X + 1)

    return work


def main() -> dict[str, Any]:
    draw = random.Random(0)
    # A child of a process that imports a module waits for ever to import it: so does all of Python.
    for number in range(3):
        in_child(number)()
    for work in (build, replace, plan, declare):
        work(0)
    statuses: collections.Counter[int] = collections.Counter()
    with Busy(build, replace, plan, declare) as busy:
        for number in range(FORKS):
            time.sleep(draw.uniform(0, 0.05))
            statuses[ended(forked(in_child(number)))] += 1
    return {
        "forks": FORKS,
        "right": statuses[RIGHT],
        "rounds": busy.rounds,
        "errors": busy.errors,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main()) + "\n")
