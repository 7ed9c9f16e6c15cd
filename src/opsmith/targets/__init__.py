"""Targets of the command line: find operators and Function classes by `FILE_OR_MODULE[:NAME]`."""

from __future__ import annotations

from opsmith.targets.definitions import classes_of
from opsmith.targets.folders import is_folder, targets_of
from opsmith.targets.target import Target, nothing_declared

__all__ = ["Target", "classes_of", "is_folder", "nothing_declared", "targets_of"]
