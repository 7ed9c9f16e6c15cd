"""Finding what is to be looked at: from a file's or module's name to the operators and Functions in it."""

from __future__ import annotations

from opsmith.locating.classes import classes_of
from opsmith.locating.target import Target

__all__ = ["Target", "classes_of"]
