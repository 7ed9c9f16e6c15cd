"""Library between torch and all kernels, built into a package."""

from __future__ import annotations

from opsmith.build.manifest import RUNTIME as LANGUAGE
from opsmith.build.manifest import BuiltFile
from opsmith.build.processor import machine
from opsmith.kernels.common.ahead import Built, SharedLibrary
from opsmith.kernels.cpp.library import VERSION
from opsmith.kernels.runtime.library import compile_runtime, runtime_digest
from opsmith.kernels.runtime.loading import LIBRARY

ANY_TARGET = "any"
"""Target of a library for every processor of this kind of machine."""


def _build() -> Built:
    library = compile_runtime().directory / LIBRARY
    described = BuiltFile(
        operator="",
        language=LANGUAGE,
        digest=runtime_digest(),
        abi=VERSION,
        target=ANY_TARGET,
        machine=machine(),
    )
    return Built(described, library.read_bytes(), "so")


RUNTIME = SharedLibrary(ANY_TARGET, _build)
"""The library between torch and all kernels, for every processor of this kind of machine."""
