"""Implementations by private names of torch, which no other folder uses. Each module has a self-test."""

import torch


def steady_device_guard() -> None:
    """Create in this thread the guard that torch 2.11 creates in the first thread to enter a fake mode."""
    ensure = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if ensure is not None and not torch.cuda.is_available():
        ensure()
