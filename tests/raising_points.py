"""Exceptions at every point of a run in turn, and counts of what is left afterwards."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import opsmith

SOURCES = str(Path(opsmith.__file__).parent)


class Planted(Exception):  # noqa: N818 - it is no error of anybody
    """An exception of a test."""


class Points:
    """Points that a run passes, at one of which it raises.

    Attributes:
        at: Number of the point that raises.
        passed: Number of the points that the run has passed.
        error: Class of the exception.
    """

    def __init__(self, error: type[BaseException]) -> None:
        self.error, self.at, self.passed = error, 0, 0
        self.storages: list[StorageWeakRef] = []

    def pass_one(self) -> None:
        """Pass a point, or raise."""
        self.passed += 1
        if self.passed == self.at:
            raise self.error

    def watch(self, tensor: Tensor) -> Tensor:
        """Count the memory of a tensor among what must be gone after the run."""
        self.storages.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A kernel or a formula with a point before it, and one between its results and its end."""

        def pointed(*args: Any, **kwargs: Any) -> Any:
            self.pass_one()
            answer = function(*args, **kwargs)
            for each in answer if isinstance(answer, tuple | list) else (answer,):
                if type(each) is Tensor:
                    self.watch(each)
            self.pass_one()
            return answer

        pointed.__signature__ = inspect_signature(function)  # type: ignore[attr-defined]
        return pointed


def inspect_signature(function: Callable[..., Any]) -> Any:
    import inspect

    return inspect.signature(function)


class _EachOperation(TorchDispatchMode):
    """A point before each operation of torch, and one after it."""

    def __init__(self, points: Points) -> None:
        super().__init__()
        self.points = points

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.points.pass_one()
        answer = operator(*args, **(kwargs or {}))
        self.points.pass_one()
        return answer


@contextmanager
def _each_call(points: Points, *files: str) -> Generator[None]:
    """A point where each function of opsmith, and each that it calls, begins and ends: as an interrupt."""
    known: dict[CodeType, bool] = {}

    def is_ours(frame: FrameType) -> bool:
        code = frame.f_code
        if code not in known:
            name = code.co_filename
            ours = name.startswith(SOURCES) or name == "<string>" or name in files
            known[code] = ours and code.co_name != "<genexpr>"  # one that is closed early would raise to nobody
        return known[code]

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if is_ours(frame) and arg is not sys.setprofile:
            points.pass_one()

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


@contextmanager
def _each_hook(points: Points) -> Generator[None]:
    """A point in each hook that packs or unpacks a saved tensor."""

    def passing(tensor: Tensor) -> Tensor:
        points.pass_one()
        return tensor.detach()  # a result that a hook keeps as it is keeps its node, in torch, too

    with torch.autograd.graph.saved_tensors_hooks(passing, passing):
        yield


PLACES: dict[str, Callable[[Points], AbstractContextManager[Any]]] = {
    "functions": lambda points: nullcontext(),
    "hooks": _each_hook,
    "operations": _EachOperation,
    "calls": _each_call,
}


def living(points: Points) -> tuple[int, int, int]:
    """Number of the watched memories, of tensors and of other objects that live, since `gc.freeze`."""
    torch.ones(1, requires_grad=True).exp().backward()  # torch drops what an earlier backward left to do
    gc.collect()
    held = sum(not each.expired() for each in points.storages)
    points.storages.clear()
    gc.collect()
    every = gc.get_objects()
    return held, sum(isinstance(each, Tensor) for each in every), len(every)


def left_after(run: Callable[[Points], None], points: Points, place: str) -> tuple[list[str], int]:
    """Raise at each point of a run in turn; return what is left, in words, and the number of points."""
    found: list[str] = []
    at = 0
    with PLACES[place](points):  # what torch imports then
        torch.ones(2, requires_grad=True).exp().sum().backward()
    gc.collect()
    gc.freeze()
    try:
        while True:
            counts = []
            for _ in range(3 if at else 6):  # the first calls of an operator find its fast path
                points.at, points.passed = at, 0
                raised = _attempt(run, points, place)
                counts.append(living(points))
            *_, before, after = [each[1:] for each in counts]
            if after > before or any(held for held, _, _ in counts):
                found.append(f"point {at} ({raised}): {counts}")
            if points.passed < at:
                return found, at
            at += 1
    finally:
        gc.unfreeze()


def _attempt(run: Callable[[Points], None], points: Points, place: str) -> str:
    try:
        with PLACES[place](points):
            run(points)
    except points.error as e:
        return "raised"
    except Exception as e:
        return f"{type(e).__name__}: {str(e)[:400]}"
    return ""
