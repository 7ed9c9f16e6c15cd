"""A record of the calls that take the slow path."""

from __future__ import annotations

from typing import Any

import pytest

from opsmith.torch_library import capabilities
from opsmith.torch_library.registration import DispatcherRegistration


def record_slow_calls(patch: pytest.MonkeyPatch, *methods: str) -> list[str]:
    """Names of the operators whose calls run a method of their registration from now on.

    None are recorded where no call takes a shorter way.

    Args:
        patch: Undoes it.
        methods: Names of the methods; by default of the one that every call through the dispatcher runs.
    """
    calls: list[str] = []
    for name in methods or ("_values",):
        own = getattr(DispatcherRegistration, name)

        def recorded(self: DispatcherRegistration, *args: Any, own: Any = own) -> Any:
            if capabilities.on("known_calls"):
                calls.append(self.specification.name)
            return own(self, *args)

        patch.setattr(DispatcherRegistration, name, recorded)
    return calls
