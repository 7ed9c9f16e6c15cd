"""Implementations by torch's private names, which no other folder uses. Each module has a self-test."""

import torch


def steady_device_guard() -> None:
    """Create the guard in this thread that torch 2.11 would create in the first thread in a fake mode."""
    ensure = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if ensure is not None and not torch.cuda.is_available():
        ensure()
