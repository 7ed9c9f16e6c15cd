"""The keys of compiled-code caches, which contain a token for an operator's sources."""

from __future__ import annotations

import sys
from typing import Any


def mark_compiled_code(name: str, token: str) -> None:
    """Add a token for an operator's sources to the keys of all caches of compiled code.

    Without it a new process would reuse code compiled from an older formula.
    """
    config = _config()
    qualified = f"torch.ops.{name.replace('::', '.')}"
    config.unsafe_marked_cacheable_functions = {**config.unsafe_marked_cacheable_functions, qualified: token}


def compiler_imported() -> bool:
    """Return True if Inductor, whose import takes longest, is imported."""
    return "torch._inductor.config" in sys.modules


def self_test() -> None:
    """A token is in the settings from which the caches' keys are made."""
    config = _config()
    before = config.unsafe_marked_cacheable_functions
    mark_compiled_code("opsmith_self_test::marked", "token")
    try:
        keyed = config.save_config_portable()["unsafe_marked_cacheable_functions"]
        assert compiler_imported()
        assert keyed["torch.ops.opsmith_self_test.marked"] == "token", "no key contains the token"
    finally:
        config.unsafe_marked_cacheable_functions = before


def _config() -> Any:
    from torch._inductor import config  # takes over a second, only needed for compilation

    return config
