"""A record of the calls that are validated in full."""

from __future__ import annotations

from typing import Any

import pytest

from opsmith.torch_library import capabilities
from opsmith.torch_library.registration import DispatcherRegistration


def record_slow_calls(patch: pytest.MonkeyPatch) -> list[str]:
    """Names of the operators whose calls are validated in full from now on.

    None are recorded where no call takes a shorter way.

    Args:
        patch: Undoes it.
    """
    calls: list[str] = []
    own = DispatcherRegistration._values

    def recorded(self: DispatcherRegistration, *args: Any) -> Any:
        if capabilities.on("known_calls"):
            calls.append(self.specification.name)
        return own(self, *args)

    patch.setattr(DispatcherRegistration, "_values", recorded)
    return calls
