"""Survey of Function classes: which can be adopted unchanged, which need a declaration, which are wrong."""

from __future__ import annotations

from opsmith.surveying.finding import Finding
from opsmith.surveying.surveyor import survey

__all__ = ["Finding", "survey"]
