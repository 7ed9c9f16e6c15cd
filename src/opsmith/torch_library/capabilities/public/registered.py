"""No operators that others registered: torch has no public name for their schemas."""

from __future__ import annotations

from typing import Any

from opsmith import errors


def overloads_of(subject: Any) -> dict[str, Any] | None:
    """Refuse.

    Raises:
        TransformError: Naming the capability.
    """
    raise errors.TransformError(
        "to adopt an operator that was registered elsewhere needs the capability `registered`, which is off",
        got=str(subject),
        mend="`opsmith doctor` says why; declare an operator of your own, with this one as a kernel",
    )
