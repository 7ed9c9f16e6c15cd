"""What a process shares: torch's settings, Python's warning filters, the environment, and more."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

FILL = "fill_uninitialized_memory"
"""torch's switch for filling new memory; its module has it by a trick, which hides it from type checkers."""


@dataclass(frozen=True)
class Setting:
    """One thing that a process shares.

    Args:
        name: What it is, in words.
        get: Reads it, as a value that compares.
        put: Sets it to what was read.
        other: Another value than the one that was read, that does no harm; None where there is none.
    """

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]
    other: Callable[[Any], Any] | None = None


def _put_filters(filters: list[Any]) -> None:
    warnings.resetwarnings()  # Python forgets then, too, what it has warned of under the filters before
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


IGNORE = (("ignore", None, Warning, None, 0),)
"""Warning filters that are none of anybody's."""

_CUDNN = torch.backends.cudnn


def _put_cudnn(state: tuple[bool, bool, bool]) -> None:
    _CUDNN.enabled, _CUDNN.benchmark, _CUDNN.deterministic = state


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
    Setting("Python's warning filters", lambda: list(warnings.filters), _put_filters, lambda _: list(IGNORE)),
    Setting("the environment's variables", lambda: dict(os.environ), _put_environment),
    Setting("the working directory", os.getcwd, os.chdir),
    Setting(
        "Python's recursion limit", sys.getrecursionlimit, sys.setrecursionlimit, lambda limit: limit + 1
    ),
    Setting(
        "NumPy's error handling",
        lambda: numpy.geterr() if (numpy := sys.modules.get("numpy")) is not None else None,
        lambda state: sys.modules["numpy"].seterr(**state) if state is not None else None,
    ),
)
"""Where a thing cannot be put back by a call, it is told all the same."""


def settings() -> dict[str, Any]:
    """Everything that is shared, as it is now."""
    return {setting.name: setting.get() for setting in SETTINGS}


@contextmanager
def other_settings() -> Iterator[dict[str, tuple[Any, Any]]]:
    """A region in which the settings are others, so that whoever sets one is seen even if it is set already.

    Yields:
        What has been changed in the region, filled in at its end: for each thing what was there, and what was
        put there.
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
            changed.update(changed_settings(others))
    finally:
        changed_settings(before)


def changed_settings(before: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What has changed since: for each thing its value before and now. It is put back.

    Example:
        >>> before = settings()
        >>> torch.set_default_dtype(torch.float64)
        >>> changed_settings(before)
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
def quiet() -> Iterator[None]:
    """A region without warnings: torch warns of its own insides where forward mode is first used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
