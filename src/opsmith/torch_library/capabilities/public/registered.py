"""No operators that others registered: torch has no public name for their schemas."""

from __future__ import annotations

import re
from typing import Any

from opsmith import errors

_KINDS = ("OpOverload", "OpOverloadPacket", "CustomOpDef")


def overloads_of(subject: Any) -> dict[str, Any] | None:
    """None for what is no operator of torch.

    Raises:
        UnsupportedTorchError: For an operator, naming the capability.
    """
    if type(subject).__name__ not in _KINDS:
        return None
    raise errors.UnsupportedTorchError(
        "it was registered elsewhere, and to adopt it needs the capability `registered`, which is off",
        operator=_name(subject),
        hint="`opsmith doctor` says why; declare an operator of your own, with this one as a kernel",
    )


def _name(subject: Any) -> str:
    """`namespace::name`, from what torch prints: `ns.name`, `ns.name.default`, `<CustomOpDef(ns::name)>`."""
    printed = str(subject)
    found = re.search(r"\((.+)\)", printed)
    return (found[1] if found else printed.replace(".", "::", 1)).removesuffix(".default")
