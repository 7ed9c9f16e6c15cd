"""Kernels of a package, and the origin of each on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opsmith import errors
from opsmith.core.kernels import BuiltKernel
from opsmith.kernels.common.ahead import FIRST_CALL
from opsmith.kernels.languages import language_of
from opsmith.shipping import SourcePackage


@dataclass(frozen=True, slots=True)
class KernelOrigin:
    """Origin of a kernel.

    Attributes:
        operator: Name of the operator.
        language: Language of the kernel.
        where: `file:line` of the kernel. origin: Description of the origin, or the reason why the reference
            runs. missing: True if the reference runs instead of the kernel.
    """

    operator: str
    language: str
    where: str
    origin: str
    missing: bool


@dataclass(frozen=True, slots=True)
class PackageOrigins:
    """Origins of the kernels of a package.

    Attributes:
        package: Name of the package.
        kernels: Origin of each kernel that has a source.
        broken: Modules that cannot be imported, whose kernels are not known, with the reason.
    """

    package: str
    kernels: list[KernelOrigin]
    broken: list[str]


def kernel_origins(package: str) -> PackageOrigins:
    """Return the origin of each kernel of a package; kernels in C++ are loaded or built now.

    Args:
        package: Name of the package, or its folder.

    Raises:
        UsageError, OperatorNotFoundError, ModuleImportError: See `SourcePackage.as_it_is`.
    """
    found = SourcePackage.as_it_is(package)
    broken = [_reason(each) for each in found.broken]
    return PackageOrigins(found.name, [_origin(kernel) for kernel in found.kernels], broken)


def _reason(error: errors.ModuleImportError) -> str:
    """Return module and exception of an import: the last line of a traceback names its class."""
    last = (error.got or "").splitlines()[-1].strip()
    return f"{error.problem.rpartition(':')[0]}: {last}"


def _origin(kernel: BuiltKernel[Any]) -> KernelOrigin:
    language, missing = language_of(kernel), False
    try:
        ahead = None if language is None else language.ahead
        origin = FIRST_CALL if ahead is None else ahead.origin(kernel)
    except (
        errors.ToolchainError,
        errors.CompileError,
        errors.KernelSignatureError,
        errors.LanguageError,
    ) as error:
        origin, missing = ": ".join(filter(None, [error.problem, error.got])), True
    return KernelOrigin(kernel.operator.name, kernel.language, kernel.where, origin, missing)
