"""opsmith: a PyTorch operator, declared once. Everything else is derived from it, or checked against it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opsmith import errors
from opsmith.core.answers import non_differentiable, not_implemented, zero
from opsmith.core.operator import Operator
from opsmith.core.samples import Make
from opsmith.declaring import declared_operators, find_operator, operator

if TYPE_CHECKING:
    from opsmith import ops as ops
    from opsmith.adopting import adopt
    from opsmith.checking import Report, check

__all__ = [
    "Make",
    "Operator",
    "Report",
    "__version__",
    "adopt",
    "check",
    "declared_operators",
    "errors",
    "find_operator",
    "non_differentiable",
    "not_implemented",
    "operator",
    "ops",
    "zero",
]

__version__ = "0.1.0"

# A face is imported when it is first used: `import opsmith` stays as light as torch allows.
_FACES = {
    "adopt": "opsmith.adopting",
    "check": "opsmith.checking",
    "Report": "opsmith.checking",
    "ops": "opsmith",
}


def __getattr__(name: str) -> Any:
    if name not in _FACES:
        raise AttributeError(f"module 'opsmith' has no attribute {name!r}")
    import importlib

    if name == "ops":
        return importlib.import_module("opsmith.ops")
    return getattr(importlib.import_module(_FACES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
