"""A region after which a module's buffers, and torch's random state, are what they were before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def undisturbed(module: torch.nn.Module | None) -> Iterator[None]:
    """A region for a run that is only looked at: the module has copies of its buffers meanwhile.

    To write the old numbers back would count as a write, after which a graph that saved them is broken. What
    a module's own Python code changes, a counter for instance, stays changed.
    """
    parts = list(module.modules()) if module is not None else []
    kept = [(part, name, buffer) for part in parts for name, buffer in part.named_buffers(recurse=False)]
    copies: dict[int, Tensor] = {}
    training = [(part, part.training) for part in parts]
    with torch.random.fork_rng(devices=_devices(), device_type=_kind()):
        try:
            for part, name, buffer in kept:
                setattr(part, name, copies.setdefault(id(buffer), buffer.detach().clone()))
            yield
        finally:
            for part, name, buffer in kept:
                setattr(part, name, buffer)
            for part, mode in training:
                part.training = mode


def _kind() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cuda" if accelerator is None else accelerator.type


def _devices() -> list[int]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return [] if accelerator is None else list(range(torch.accelerator.device_count()))
