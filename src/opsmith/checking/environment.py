"""What a check runs with, as a report keeps it."""

from __future__ import annotations

import platform

import torch


def environment() -> dict[str, str]:
    """What a check runs with: versions, platform, devices."""
    import opsmith

    devices = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        devices += [kind.type] * torch.accelerator.device_count()
    return {
        "opsmith": opsmith.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": ", ".join(devices),
    }
