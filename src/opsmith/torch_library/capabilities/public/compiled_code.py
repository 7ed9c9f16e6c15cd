"""No caches of compiled code on disk: nothing could tell them that an operator's sources have changed."""

from __future__ import annotations

import torch


def mark_compiled_code(name: str, token: str) -> None:
    """Turn the caches off in this process, from the first trace that holds an operator."""
    torch.compiler.config.force_disable_caches = True


def compiler_imported() -> bool:
    """Yes, as far as `mark_compiled_code` is concerned, which needs no compiler."""
    return True
