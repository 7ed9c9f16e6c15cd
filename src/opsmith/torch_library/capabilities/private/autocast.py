"""The dispatch keys of autocast: their names, a region without a key, and kernels that traces look up."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch

_C: Any = torch._C


@functools.cache
def autocast_key(device: str) -> str | None:
    """Name of autocast's dispatch key for a type of device; None if this torch has none."""
    try:
        key = "Autocast" + _C._dispatch_key_for_device(device)
    except RuntimeError:
        return None
    return key if hasattr(_C.DispatchKey, key) else None


def without_autocast(device: str) -> AbstractContextManager[None]:
    """Context in which autocast is off on a type of device."""
    key = "Autocast" + _C._dispatch_key_for_device(device)
    guard: AbstractContextManager[None] = _C._ExcludeDispatchKeyGuard(
        _C.DispatchKeySet(getattr(_C.DispatchKey, key))
    )
    return guard


def serve_autocast_while_tracing(operator: Any, key: str, kernel: Any) -> None:
    """Register an autocast kernel in Python, where traced calls look for it."""
    operator.py_kernels.pop(getattr(_C.DispatchKey, key), None)  # left by an earlier adoption
    operator.py_impl(getattr(_C.DispatchKey, key))(kernel)


def self_test() -> None:
    """A kernel at the CPU's key is called under autocast, but not in the region without autocast."""
    assert autocast_key("cpu") == "AutocastCPU"
    assert autocast_key("meta") is None
    library = torch.library.Library("opsmith_self_test", "FRAGMENT")
    library.define("cast(Tensor x) -> Tensor")
    operator: Any = torch.ops.opsmith_self_test.cast.default

    def lowered(keyset: Any, x: torch.Tensor) -> Any:
        with without_autocast("cpu"):
            return operator(x.bfloat16())

    library.impl("cast", lambda x: x * 2, "CompositeExplicitAutograd")
    library.impl("cast", lowered, "AutocastCPU", with_keyset=True)
    serve_autocast_while_tracing(operator, "AutocastCPU", lowered)
    x = torch.ones(2, 2)
    assert operator(x).dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert operator(x).dtype is torch.bfloat16
        with without_autocast("cpu"):
            assert operator(x).dtype is (x @ x).dtype is torch.float32
    assert _C.DispatchKey.AutocastCPU in operator.py_kernels
    library._destroy()
