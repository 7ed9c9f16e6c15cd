"""Random states of the process: torch's, of the CPU and of each device, Python's and NumPy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def torch_state() -> list[Tensor]:
    """Return the state of each default generator: of the CPU, then of each device."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return [torch.get_rng_state()]
    module = torch.get_device_module(accelerator)
    return [torch.get_rng_state(), *map(module.get_rng_state, range(module.device_count()))]


def set_torch_state(states: list[Tensor]) -> None:
    """Set what `torch_state` has returned."""
    torch.set_rng_state(states[0])
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        for index, state in enumerate(states[1:]):
            torch.get_device_module(accelerator).set_rng_state(state, index)


def seed_torch(seed: int) -> None:
    """Seed each default generator, as `torch.manual_seed` does, which keeps a stack for each kind of device.

    Example:
        >>> with torch_state_restored():
        ...     seed_torch(7)
        ...     torch.initial_seed()
        7
    """
    torch.default_generator.manual_seed(seed)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        device = torch.get_device_module(accelerator)
        getattr(device, "manual_seed_all", device.manual_seed)(seed)  # torch.mps has one device


def seed_all(seed: int) -> None:
    """Seed every random state."""
    seed_torch(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def random_states() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Functions that read and set each random state, by name."""
    states: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "torch": (torch_state, set_torch_state),
        "Python's `random`": (random.getstate, random.setstate),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["NumPy"] = (numpy.random.get_state, numpy.random.set_state)
    return states


@contextmanager
def torch_state_restored() -> Iterator[list[Tensor]]:
    """A region after which torch's random state is as it was before; it gets that state."""
    before = torch_state()
    try:
        yield before
    finally:
        set_torch_state(before)


@contextmanager
def random_states_restored() -> Iterator[dict[str, Any]]:
    """A region after which every random state is as it was before; it gets these states by name."""
    before = {name: get() for name, (get, _) in random_states().items()}
    try:
        yield before
    finally:
        for name, (_, put) in random_states().items():
            if name in before:
                put(before[name])


def is_state(states: list[Tensor]) -> bool:
    """Return True if torch's random state is the same as it was: nothing was drawn.

    Example:
        >>> states = torch_state()
        >>> is_state(states)
        True
    """
    return all(map(torch.equal, states, torch_state()))


def moved_since(before: dict[str, Any]) -> list[str]:
    """Return the names of the random states that are others now.

    Example:
        >>> with random_states_restored() as before:
        ...     _ = random.random()
        ...     moved_since(before)
        ["Python's `random`"]
    """
    now = {name: get() for name, (get, _) in random_states().items() if name in before}
    return [name for name, state in now.items() if not _same(before[name], state)]


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool((first == second).all()) if hasattr(first, "all") else bool(first == second)
