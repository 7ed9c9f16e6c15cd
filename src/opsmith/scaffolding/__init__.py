"""Feature package behind `opsmith new`: a Python package with an operator, its kernels and its tests."""

from __future__ import annotations

from opsmith.scaffolding.new_package import LICENCES, NewPackage, new_package
from opsmith.scaffolding.opsmith_source import OpsmithSource, opsmith_source

__all__ = ["LICENCES", "NewPackage", "OpsmithSource", "new_package", "opsmith_source"]
