"""Exceptions at every point of a run in turn, and counts of what is left afterwards."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import opsmith

SOURCES = str(Path(opsmith.__file__).parent)


class PlantedError(Exception):
    """An exception that nobody expects."""


class Points:
    """Points that a run passes, at one of which it raises.

    Args:
        error: Class of the exception.

    Attributes:
        at: Number of the point that raises; 0 for none.
        passed: Number of the points that the run has passed.
    """

    def __init__(self, error: type[BaseException] = PlantedError) -> None:
        self.error, self.at, self.passed = error, 0, 0
        self.storages: list[StorageWeakRef] = []

    def pass_one(self, *_: Any) -> None:
        """Pass a point, or raise."""
        self.passed += 1
        if self.passed == self.at:
            raise self.error

    def watch(self, tensor: Tensor) -> Tensor:
        """Count the memory of a tensor among what must be gone after the run."""
        self.storages.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A kernel or a formula with a point before it, and one where its results are there."""

        def pointed(*args: Any, **kwargs: Any) -> Any:
            self.pass_one()
            answer = function(*args, **kwargs)
            for each in answer if isinstance(answer, tuple | list) else (answer,):
                if type(each) is Tensor:
                    self.watch(each)
            self.pass_one()
            return answer

        pointed.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        pointed.__annotations__ = function.__annotations__
        return pointed


class _EachOperation(TorchDispatchMode):
    """A point before each operation of torch, and one after it, where its memory is allocated."""

    def __init__(self, points: Points) -> None:
        super().__init__()
        self.points = points

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.points.pass_one()
        answer = operator(*args, **(kwargs or {}))
        self.points.pass_one()
        return answer


@contextmanager
def _each_call(points: Points) -> Generator[None]:
    """A point where each function of opsmith, and each that it calls, begins and ends, as for a signal."""
    known: dict[CodeType, bool] = {}

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if code not in known:
            known[code] = code.co_filename.startswith(SOURCES) or code.co_filename == "<string>"
        if known[code]:
            points.pass_one()

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


@contextmanager
def _to_nobody(cause: type[BaseException]) -> Generator[None]:
    """Context in which what Python raises to nobody is dropped, as of a generator that it closes.

    A report of it would keep its frames.
    """
    report = sys.unraisablehook
    sys.unraisablehook = lambda found: None if _led_to(found.exc_value, cause) else report(found)
    try:
        yield
    finally:
        sys.unraisablehook = report


@contextmanager
def _each_hook(points: Points) -> Generator[None]:
    """A point in each hook that packs or unpacks a saved tensor."""

    def passing(tensor: Tensor) -> Tensor:
        points.pass_one()
        return tensor.detach()  # a hook that keeps a result as it is keeps its node, in torch, too

    with torch.autograd.graph.saved_tensors_hooks(passing, passing):
        yield


PLACES: dict[str, Callable[[Points], AbstractContextManager[Any]]] = {
    "functions": lambda points: nullcontext(),
    "hooks": _each_hook,
    "operations": _EachOperation,
    "calls": _each_call,
}


def _living(points: Points) -> tuple[int, int, int]:
    """Number of the watched memories, of the tensors and of all objects that came since `gc.freeze`."""
    torch.ones(1, requires_grad=True).exp().backward()  # torch drops what an earlier backward left to do
    gc.collect()
    held = sum(not each.expired() for each in points.storages)
    points.storages.clear()
    gc.collect()
    every = gc.get_objects()
    return held, sum(issubclass(type(each), Tensor) for each in every), len(every)


def left_after(
    make: Callable[[], tuple[Tensor, ...]], run: Callable[..., object], points: Points, place: str
) -> tuple[list[str], int]:
    """Raise at each point of a run in turn; return what is left, in words, and the number of points.

    Args:
        make: Makes the arguments of the run.
        run: The run.
        points: Its points.
        place: Name of the place, among `PLACES`.
    """

    def attempt(at: int) -> tuple[bool, tuple[int, int, int]]:
        points.at, points.passed = at, 0
        arguments = [points.watch(each) for each in make()]
        try:
            with _to_nobody(points.error), PLACES[place](points):
                run(*arguments)
        except BaseException as error:
            if not (at and _led_to(error, points.error)):
                raise
        del arguments
        return points.passed >= at, _living(points)

    def repeated(at: int, times: int) -> list[tuple[int, int, int]]:
        return [attempt(at)[1] for _ in range(times)]

    found: list[str] = []
    with PLACES[place](Points()):  # torch imports modules then
        torch.ones(2, requires_grad=True).exp().sum().backward()
    gc.collect()
    gc.freeze()
    counts = repeated(0, 6)  # the first calls find the fast path, which has empty tensors as examples
    if counts[-1] != counts[-3]:  # what comes once is no leak, and may belong to something else
        counts = repeated(0, 6)
    if counts[-1] != counts[-3] or any(held for held, _, _ in counts):
        found.append(f"without an exception: {counts}")
    at, reached = 0, True
    while reached:
        at += 1
        reached, count = attempt(at)
        if count > counts[-1]:  # something is there more, once or each time
            tensors, counts = counts[-1][1], [count, *repeated(at, 3)]
            if counts[-1] > counts[1] or any(held for held, _, _ in counts) or counts[-1][1] > tensors:
                found.append(f"point {at}: {counts}")
    return found, at - 1


def _led_to(error: BaseException | None, cause: type[BaseException]) -> bool:
    """Return True if an error is of a class, or was raised for one that is."""
    while error is not None and not isinstance(error, cause):
        error = error.__cause__ or error.__context__
    return error is not None
