"""Autocast by its own context manager, and the names of its keys as a table."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from typing import Any

import torch

_KEYS = {
    "cpu": "AutocastCPU",
    "cuda": "AutocastCUDA",
    "xpu": "AutocastXPU",
    "mps": "AutocastMPS",
    "hpu": "AutocastHPU",
    "mtia": "AutocastMTIA",
    "maia": "AutocastMAIA",
    "privateuseone": "AutocastPrivateUse1",
}
_numbers = itertools.count()


def autocast_key(device: str) -> str | None:
    """Name of the dispatch key of autocast on a type of device; None where this torch has none."""
    key = _KEYS.get(device)
    if key is None:
        return None
    library = torch.library.Library(f"opsmith_keys_{next(_numbers)}", "FRAGMENT")
    library.define("cast(Tensor x) -> Tensor")
    try:
        library.impl("cast", lambda x: x.clone(), key)
    except RuntimeError:  # torch does not know the key
        return None
    return key


def without_autocast(device: str) -> AbstractContextManager[None]:
    """A region in which autocast is off on a type of device."""
    return torch.autocast(device, enabled=False)


def serve_autocast_while_tracing(operator: Any, key: str, kernel: Any) -> None:
    """Nothing: a trace finds the kernel where the dispatcher does."""
