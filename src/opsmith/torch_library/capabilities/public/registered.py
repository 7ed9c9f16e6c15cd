"""No operators that others registered: torch has no public name for their schemas."""

from __future__ import annotations

from typing import Any

from opsmith import errors

_KINDS = ("OpOverload", "OpOverloadPacket", "CustomOpDef")


def overloads_of(subject: Any) -> dict[str, Any] | None:
    """None for what is no operator of torch.

    Raises:
        TransformError: For an operator, naming the capability.
    """
    if type(subject).__name__ not in _KINDS:
        return None
    raise errors.TransformError(
        "to adopt an operator that was registered elsewhere needs the capability `registered`, which is off",
        got=str(subject),
        mend="`opsmith doctor` says why; declare an operator of your own, with this one as a kernel",
    )
