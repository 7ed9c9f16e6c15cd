"""What a check runs with, as a report keeps it, and what it does not run in."""

from __future__ import annotations

import platform

import torch

from opsmith import errors


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


def refuse_hooks() -> None:
    """Refuse to run among hooks on saved tensors: torch refuses them under `vmap`, whatever the operator.

    Raises:
        UsageError: If the caller is inside of `saved_tensors_hooks`, or of what is made of them.
    """
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("a check has none"):
            return
    except RuntimeError as error:
        raise errors.UsageError(
            "a check was begun among hooks on saved tensors",
            expected="none: torch refuses them under `vmap` and `torch.func`",
            got="hooks, of `saved_tensors_hooks` or `save_on_cpu`",
            mend="call `check` outside of the `with`",
        ) from error
