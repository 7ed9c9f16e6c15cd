"""Global settings of the process: torch's, Python's warning filters, the environment, and others."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")

FILL = "fill_uninitialized_memory"
"""torch's switch for filling new memory, which its module hides from type checkers."""


@dataclass(frozen=True)
class Setting:
    """One setting that the process shares.

    Args:
        name: Description.
        get: Reads it, as a value that can be compared.
        put: Sets it to a value that was read.
        other: Returns a different, harmless value for the one that was read; None where there is none.
        by_libraries: True if libraries change it when they are imported, as is usual.
    """

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]
    other: Callable[[Any], Any] | None = None
    by_libraries: bool = False


def _put_filters(filters: list[Any]) -> None:
    warnings.resetwarnings()  # this also resets the registry of shown warnings
    warnings.filters[:] = filters  # type: ignore[index]


def _put_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _autocast() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def _put_autocast(state: tuple[bool, torch.dtype]) -> None:
    torch.set_autocast_enabled("cpu", state[0])
    torch.set_autocast_dtype("cpu", state[1])


def _put_fill(filled: bool) -> None:
    setattr(torch.utils.deterministic, FILL, filled)


IGNORE = ("ignore", None, Warning, None, 0)
"""The filter that `warnings.simplefilter` makes."""

_CUDNN = torch.backends.cudnn


def _put_cudnn(state: tuple[bool, bool, bool]) -> None:
    # An assignment is refused after `torch.backends.disable_global_flags()`. None leaves a flag as it is.
    enabled, benchmark, deterministic = state
    _CUDNN.set_flags(enabled, benchmark, None, deterministic, None, None)


SETTINGS = (
    Setting(
        "torch's default dtype",
        torch.get_default_dtype,
        torch.set_default_dtype,
        lambda dtype: torch.float32 if dtype == torch.float64 else torch.float64,
    ),
    Setting("torch's default device", torch.get_default_device, lambda device: None),
    Setting("grad mode (`torch.is_grad_enabled()`)", torch.is_grad_enabled, torch.set_grad_enabled),
    Setting("inference mode", torch.is_inference_mode_enabled, lambda on: None),
    Setting("autocast", _autocast, _put_autocast),
    Setting(
        "torch's deterministic mode",
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
        lambda mode: 0 if mode else 1,
    ),
    Setting("`fill_uninitialized_memory`", lambda: getattr(torch.utils.deterministic, FILL), _put_fill),
    Setting(
        "the number of torch's threads",
        torch.get_num_threads,
        torch.set_num_threads,
        lambda count: count - 1 if count > 1 else 2,
    ),
    Setting(
        "torch's float32 matmul precision",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        lambda precision: "high" if precision == "highest" else "highest",
    ),
    Setting(
        "autograd's anomaly mode",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda state: torch.autograd.set_detect_anomaly(*state),
    ),
    Setting(
        "cuDNN's flags",
        lambda: (_CUDNN.enabled, _CUDNN.benchmark, _CUDNN.deterministic),
        _put_cudnn,
        lambda state: (state[0], not state[1], not state[2]),
    ),
    Setting(
        "Python's warning filters",
        lambda: list(warnings.filters),
        _put_filters,
        lambda _: [IGNORE],
        by_libraries=True,
    ),
    Setting("the environment's variables", lambda: dict(os.environ), _put_environment, by_libraries=True),
    Setting("the working directory", os.getcwd, os.chdir),
    Setting(
        "Python's recursion limit", sys.getrecursionlimit, sys.setrecursionlimit, lambda limit: limit + 1
    ),
    Setting(
        "NumPy's error handling",
        lambda: numpy.geterr() if (numpy := sys.modules.get("numpy")) is not None else None,
        lambda state: sys.modules["numpy"].seterr(**state) if state is not None else None,
        by_libraries=True,
    ),
)
"""All settings. A change is reported even if the setting cannot be restored by a call."""


@dataclass(frozen=True)
class ImportChanges:
    """Settings that the import of a file or module has changed.

    Args:
        source: Path of the file, or name of the module.
        changed: Value of each setting before and after.
    """

    source: str
    changed: Mapping[str, tuple[Any, Any]]

    @classmethod
    def since(cls, before: Mapping[str, Any], source: str) -> ImportChanges:
        """Compare the settings with those before an import; those that libraries change are left out."""
        own = [each for each in SETTINGS if not each.by_libraries]
        pairs = {each.name: (before[each.name], each.get()) for each in own}
        return cls(source, {name: pair for name, pair in pairs.items() if pair[0] != pair[1]})


import_changes: ContextVar[ImportChanges | None] = ContextVar("import_changes", default=None)
"""What the import of the checked file has changed; the command sets it, which imports the file."""


def settings() -> dict[str, Any]:
    """Read all settings."""
    return {setting.name: setting.get() for setting in SETTINGS}


@contextmanager
def other_settings() -> Iterator[dict[str, tuple[Any, Any]]]:
    """Change the settings within the context, so that a write of a value that is set already is detected.

    Yields:
        Changes within the context, filled in at its end: for each setting the value before and after.
    """
    before = settings()
    changed: dict[str, tuple[Any, Any]] = {}
    try:
        for setting in SETTINGS:
            if setting.other is not None:
                setting.put(setting.other(before[setting.name]))
        others = settings()
        try:
            yield changed
        finally:
            changed.update(restore_settings(others))
    finally:
        restore_settings(before)


def restore_settings(before: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Restore the settings; return the value before and after of each changed one.

    Example:
        >>> before = settings()
        >>> torch.set_default_dtype(torch.float64)
        >>> restore_settings(before)
        {"torch's default dtype": (torch.float32, torch.float64)}
        >>> torch.get_default_dtype()
        torch.float32
    """
    changed: dict[str, tuple[Any, Any]] = {}
    for setting in SETTINGS:
        was, now = before[setting.name], setting.get()
        if was != now:
            changed[setting.name] = was, now
            setting.put(was)
    return changed


@contextmanager
def _set(get: Callable[[], T], put: Callable[[T], Any], value: T) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype within the context, in which it makes tensors of numbers and of shapes."""
    with _set(torch.get_default_dtype, torch.set_default_dtype, dtype):
        yield


@contextmanager
def thread_count(count: int) -> Iterator[None]:
    """Set the number of torch's threads within the context, or in a decorated function.

    One thread is fastest for tensors of a few thousand elements: with several, each operation waits for the
    slowest thread.

    Example:
        >>> with thread_count(1):
        ...     torch.get_num_threads()
        1
    """
    with _set(torch.get_num_threads, torch.set_num_threads, count):
        yield


@contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress warnings within the context; torch warns at the first use of forward mode.

    A context inside of another changes nothing, unless what ran in between has changed the filters.
    """
    global _suppressed
    if _suppressed and warnings.filters and tuple(warnings.filters[0]) == IGNORE:
        yield
        return
    before, _suppressed = _suppressed, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _suppressed = before


_suppressed = False
"""True within a context of `without_warnings`."""


@contextmanager
def without_logs() -> Iterator[None]:
    """Suppress log lines within the context: torch logs errors that it also raises, with whole graphs."""
    before = logging.root.manager.disable
    if before >= logging.ERROR:  # each change empties the caches of all loggers
        yield
        return
    with _set(lambda: before, logging.disable, logging.ERROR):
        yield
