"""torch's random state: that of the CPU, and that of each device of the accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def torch_state_restored() -> Iterator[list[Tensor]]:
    """A region after which torch's random state is as it was before; it gets that state."""
    before = torch_state()
    try:
        yield before
    finally:
        set_torch_state(before)


def is_state(states: list[Tensor]) -> bool:
    """Return True if torch's random state is the same as it was: nothing was drawn.

    Example:
        >>> states = torch_state()
        >>> is_state(states)
        True
    """
    return all(map(torch.equal, states, torch_state()))
