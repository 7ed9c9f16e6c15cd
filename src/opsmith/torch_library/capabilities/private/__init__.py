"""The means that use torch's private names; no other folder of the package does. Each module tests itself."""

import torch


def steady_device_guard() -> None:
    """Make here what torch 2.11 makes in the first thread to enter a fake mode, and loses with it."""
    ensure = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if ensure is not None and not torch.cuda.is_available():
        ensure()
