"""Shipping: build the kernels of a package before its users install it."""

from __future__ import annotations

from opsmith.shipping.builder import build_package, staged_build
from opsmith.shipping.package_build import PackageBuild
from opsmith.shipping.source_package import SourcePackage
from opsmith.shipping.targets import BuildTargets
from opsmith.shipping.torch_library import TorchLibrary, build_torch_library

__all__ = [
    "BuildTargets",
    "PackageBuild",
    "SourcePackage",
    "TorchLibrary",
    "build_package",
    "build_torch_library",
    "staged_build",
]
