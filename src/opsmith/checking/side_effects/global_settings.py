"""Global settings and random states of the process: torch's, Python's, NumPy's, and the environment."""

from __future__ import annotations

import logging
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

FILL = "fill_uninitialized_memory"
"""torch's switch for filling new memory, which its module hides from type checkers."""


@dataclass(frozen=True)
class Setting:
    """One setting that the process shares.

    Args:
        name: Description.
        get: Returns its value in a form that can be compared.
        put: Sets it to a value that `get` returned.
        other: Returns a harmless value that differs from the current value; None if there is none.
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


def _put_autocast(state: tuple[bool, torch.dtype]) -> None:
    torch.set_autocast_enabled("cpu", state[0])
    torch.set_autocast_dtype("cpu", state[1])


def _numpy(get: Callable[[Any], Any]) -> Any:
    """An attribute of NumPy; None if NumPy is not imported."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else get(numpy)


IGNORE = ("ignore", None, Warning, None, 0)
"""The warning filter that `warnings.simplefilter` makes."""

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
    Setting(
        "autocast",
        lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        _put_autocast,
    ),
    Setting(
        "torch's deterministic mode",
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
        lambda mode: 0 if mode else 1,
    ),
    Setting(
        "`fill_uninitialized_memory`",
        lambda: getattr(torch.utils.deterministic, FILL),
        lambda filled: setattr(torch.utils.deterministic, FILL, filled),
    ),
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
        lambda: _numpy(lambda numpy: numpy.geterr()),
        lambda state: state and _numpy(lambda numpy: numpy.seterr(**state)),
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
"""Changes by the import of the checked file; the command, which imports the file, sets this."""


def settings(every: Iterable[Setting] = SETTINGS) -> dict[str, Any]:
    """Read all settings."""
    return {setting.name: setting.get() for setting in every}


@contextmanager
def other_settings() -> Iterator[dict[str, tuple[Any, Any]]]:
    """Change the settings within the context, so that setting them to the original value is detected.

    Yields:
        Changes within the context, added at its end: the value of each setting before and after.
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
    """Restore the settings; return the old and the new value of each changed setting.

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
def _restored(get: Callable[[], T], put: Callable[[T], Any], value: T | None = None) -> Iterator[T]:
    """A region that yields a state and restores it at the end; it may begin with a given state."""
    before = get()
    if value is not None:
        put(value)
    try:
        yield before
    finally:
        put(before)


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Set torch's default dtype, for new tensors, within the context."""
    return _restored(torch.get_default_dtype, torch.set_default_dtype, dtype)


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
    with _restored(torch.get_num_threads, torch.set_num_threads, count):
        yield


@contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress warnings within the context; torch warns at the first use of forward mode.

    A nested context changes nothing, unless code in between has changed the filters.
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
    with _restored(lambda: before, logging.disable, logging.ERROR):
        yield


def _accelerator() -> Any:
    """Torch's module of the accelerator; None if there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else torch.get_device_module(accelerator)


def torch_state() -> list[Tensor]:
    """Return the state of each default generator: of the CPU, then of each device."""
    device = _accelerator()
    states = [] if device is None else map(device.get_rng_state, range(device.device_count()))
    return [torch.get_rng_state(), *states]


def set_torch_state(states: list[Tensor]) -> None:
    """Set a state that `torch_state` has returned."""
    torch.set_rng_state(states[0])
    for index, state in enumerate(states[1:]):
        _accelerator().set_rng_state(state, index)


def seed_torch(seed: int) -> None:
    """Seed each default generator, like `torch.manual_seed`, which also stores a stack for each device type.

    Example:
        >>> with torch_state_restored():
        ...     seed_torch(7)
        ...     torch.initial_seed()
        7
    """
    torch.default_generator.manual_seed(seed)
    device = _accelerator()
    if device is not None:
        getattr(device, "manual_seed_all", device.manual_seed)(seed)  # torch.mps has one device


def seed_all(seed: int) -> None:
    """Seed every random state."""
    seed_torch(seed)
    random.seed(seed)
    _numpy(lambda numpy: numpy.random.seed(seed % 2**32))


RANDOM_STATES = (
    Setting("torch", torch_state, set_torch_state),
    Setting("Python's `random`", random.getstate, random.setstate),
    Setting(
        "NumPy",
        lambda: _numpy(lambda numpy: numpy.random.get_state()),
        lambda state: state and _numpy(lambda numpy: numpy.random.set_state(state)),
    ),
)
"""Every random state."""


def torch_state_restored() -> AbstractContextManager[list[Tensor]]:
    """A region that yields torch's random state, and restores it at the end."""
    return _restored(torch_state, set_torch_state)


def random_states_restored() -> AbstractContextManager[dict[str, Any]]:
    """A region that yields every random state by name, and restores the states at the end."""

    def put(before: dict[str, Any]) -> None:
        for each in RANDOM_STATES:
            each.put(before[each.name])

    return _restored(lambda: settings(RANDOM_STATES), put)


def is_state(states: list[Tensor]) -> bool:
    """Return True if torch's random state has not changed, so that no numbers were drawn.

    Example:
        >>> states = torch_state()
        >>> is_state(states)
        True
    """
    return all(map(torch.equal, states, torch_state()))


def moved_since(before: dict[str, Any]) -> list[str]:
    """Return the names of the random states that have changed.

    Example:
        >>> with random_states_restored() as before:
        ...     _ = random.random()
        ...     moved_since(before)
        ["Python's `random`"]
    """
    now = settings(RANDOM_STATES)
    return [name for name, was in before.items() if was is not None and not _same(was, now[name])]


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool((first == second).all()) if hasattr(first, "all") else bool(first == second)
