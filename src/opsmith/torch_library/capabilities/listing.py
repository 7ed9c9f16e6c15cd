"""What `opsmith doctor` tells about capabilities: each is looked at, and its self-test is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opsmith import config
from opsmith.torch_library.capabilities.capability import Capability, examine
from opsmith.torch_library.capabilities.table import CAPABILITIES


@dataclass(frozen=True)
class Listed:
    """A capability, with the torch that is here.

    Args:
        capability: What it is.
        on: Whether it is used.
        why: Why not; empty where it is.
    """

    capability: Capability
    on: bool
    why: str

    @property
    def fatal(self) -> bool:
        """Whether opsmith does not work because of it."""
        return not self.on and self.capability.instead is None

    def to_dict(self) -> dict[str, Any]:
        """The row in JSON's types."""
        return {
            "name": self.capability.name,
            "purpose": self.capability.purpose,
            "on": self.on,
            "why": self.why or None,
            "instead": None if self.on else self.capability.instead,
            "required": self.capability.instead is None,
        }


def listing() -> list[Listed]:
    """Every capability, examined now, on a torch that is tested too."""
    conservative = config.conservative()
    rows = []
    for capability in CAPABILITIES.values():
        if conservative and capability.instead is not None:
            rows.append(Listed(capability, False, f"{config.CONSERVATIVE}=1"))
        else:
            found = examine(capability)
            rows.append(Listed(capability, found.on, found.why))
    return rows
