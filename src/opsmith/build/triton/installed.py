"""Whether Triton is there: it is no part of a torch for the CPU, and exists for few systems."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any

from opsmith import errors
from opsmith.extras import install

LANGUAGE = threading.RLock()
"""Held by who compiles, and by the interpreter, which changes Triton's language while it runs."""


def triton_module() -> Any:
    """Triton, imported when it is first needed.

    Raises:
        ToolchainError: If it is not installed, or does not load.
    """
    try:
        import triton
    except ImportError as error:
        missing = error.name == "triton"
        raise errors.ToolchainError(
            "Triton is not installed" if missing else "Triton does not load",
            expected="the package `triton`, which torch for CUDA brings along",
            got=f"none on {sys.platform}" if missing else str(error),
            hint=f"{install('triton')}; until then the reference computes the operator",
        ) from error
    module: ModuleType = triton
    return module


def missing_triton() -> str | None:
    """Why Triton cannot be used here; None where it can."""
    try:
        triton_module()
    except errors.ToolchainError as error:
        return f"{error.problem}: {error.hint}"
    return None
