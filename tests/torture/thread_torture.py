"""Run as a program: threads call an operator while another reloads its C++ kernel again and again.

The kernel has some texts in turn, and each adds another number. A call may return what any text adds that was
in force while it ran. What a text adds that was replaced before the call is an error. Prints one JSON object.
"""

from __future__ import annotations

import collections
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import opsmith

THREADS = 4
TEXT = """
void added(Contiguous<const float> x, Contiguous<float> y) {{
  for (int64_t i = 0; i < x.numel(); i++) y[i] = x[i] + {number};
}}
"""


def operator(number: int) -> Any:
    @opsmith.operator("torture::added")
    def added(x: Tensor) -> Tensor:
        return x + number

    return added


added = operator(-1)


def by_handle(x: Tensor) -> Tensor:
    return added(x)


def by_torch(x: Tensor) -> Tensor:
    result: Tensor = torch.ops.torture.added(x)
    return result


def by_overload(x: Tensor) -> Tensor:
    result: Tensor = torch.ops.torture.added.default(x)
    return result


def with_gradient(x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    result = added(x)
    (gradient,) = torch.autograd.grad(result.sum(), x)
    assert torch.equal(gradient, torch.ones_like(x)), gradient
    return result.detach()


CALLS: tuple[Callable[[Tensor], Tensor], ...] = (by_handle, by_torch, by_overload, with_gradient)


class Callers:
    """Threads that call the operator until they are stopped.

    Args:
        texts: Number of texts.

    Attributes:
        begun: Number of reloads that have begun.
        ended: Number of reloads that have ended.
        calls: Number of calls of each thread.
        errors: Texts of errors, with their numbers.
    """

    def __init__(self, texts: int) -> None:
        self.texts = texts
        self.begun = self.ended = 0
        self.calls = [0] * THREADS
        self.errors: collections.Counter[str] = collections.Counter()
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._call, args=(number,)) for number in range(THREADS)]

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _call(self, number: int) -> None:
        call = CALLS[number % len(CALLS)]
        while not self._stopped.is_set():
            x = torch.zeros(2 + self.calls[number] % 7)  # some sizes, so that plans are made all the time
            oldest = self.ended
            try:
                numbers = set(call(x).tolist())
                allowed = {float(reload % self.texts) for reload in range(oldest, self.begun + 1)}
                if len(numbers) != 1 or not numbers <= allowed:
                    self.errors[f"{call.__name__}: a replaced kernel ran"] += 1
            except Exception as error:
                self.errors[f"{call.__name__}: {type(error).__name__}: {error}"] += 1
            self.calls[number] += 1


def threads(again: Callable[[int], object], reloads: int, texts: int) -> dict[str, Any]:
    """Replace the kernel while threads call its operator.

    Args:
        again: Replaces it by the one that adds this number.
        reloads: Number of times.
        texts: Number of texts.
    """
    again(0)
    with Callers(texts) as callers:
        for reload in range(1, reloads + 1):
            callers.begun = reload
            again(reload % texts)
            callers.ended = reload
            before = sum(callers.calls)
            while sum(callers.calls) < before + THREADS * (reload % 8):
                time.sleep(0)
    return {"calls": sum(callers.calls), "reloads": callers.ended, "errors": callers.errors}


def reloaded(number: int) -> None:
    """Edit the kernel's file, and reload it."""
    FILE.write_text(TEXT.format(number=number))
    if added.specification.kernels:
        added.reload()
    else:
        added.kernel("cpu", cpp_file=FILE, strict=True)


def declared(number: int) -> None:
    """Declare the kernel again, as a notebook cell does."""
    added.kernel("cpu", cpp=TEXT.format(number=number), strict=True)


def redeclared(number: int) -> None:
    """Declare the operator again, as a notebook cell does, without the kernel for the half of the numbers."""
    operator(number)
    if number % 2:
        declared(number)


if __name__ == "__main__":
    _, mode, *numbers = sys.argv
    with tempfile.TemporaryDirectory() as folder:
        FILE = Path(folder) / "added.cpp"
        found = threads(
            {each.__name__: each for each in (reloaded, declared, redeclared)}[mode], *map(int, numbers)
        )
    sys.stdout.write(json.dumps(found) + "\n")
