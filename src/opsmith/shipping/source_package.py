"""Package whose kernels are built: its folder, and the kernels that its files declare."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opsmith import errors
from opsmith.build.packaged import package_of
from opsmith.core.kernels import BuiltKernel
from opsmith.declaration import declared_operators
from opsmith.display import short_repr
from opsmith.kernels.languages import Language, language_of, own_languages
from opsmith.targets import Target
from opsmith.targets.target import find_module, import_file


@dataclass(frozen=True)
class SourcePackage:
    """Package whose kernels are built.

    Attributes:
        name: Name of the module.
        root: Folder of the outermost package, which gets the built kernels.
        kernels: Kernels with source code that files of the module declare.
        whole: True if the module is the outermost package; False if the module is a part of it.
        broken: Errors of modules that cannot be imported, whose kernels are unknown.
    """

    __repr__ = short_repr

    name: str
    root: Path
    kernels: tuple[BuiltKernel[Any], ...]
    whole: bool = True
    broken: tuple[errors.ModuleImportError, ...] = ()

    @classmethod
    def of(cls, named: str | None = None) -> SourcePackage:
        """Import a package and collect its kernels, to build them.

        Args:
            named: See `as_it_is`.

        Raises:
            UsageError: If it is not a package, or the package of the project cannot be determined.
            OperatorNotFoundError: If there is no such module, or it has no kernels with source code.
            ModuleImportError: If the package or a module in it cannot be imported.
        """
        package = cls.as_it_is(named)
        if package.broken:
            raise _incomplete(package)
        if not package.kernels:
            raise errors.OperatorNotFoundError(
                f"`{package.name}` declares no kernel with source code",
                expected="operators with a kernel in C++, CUDA C++ or Triton, in this package",
                hint="let the package import the module with the kernels; kernels in Python are not built",
            )
        return package

    @classmethod
    def as_it_is(cls, named: str | None = None) -> SourcePackage:
        """Import a package and collect the kernels of all modules that can be imported.

        Args:
            named: Name of a module in a package, or path of the folder of a package or project; None for the
                project in the current directory.

        Raises:
            UsageError: If it is not a package, or the package of the project cannot be determined.
            OperatorNotFoundError: If there is no such module.
            ModuleImportError: If the named module itself cannot be imported.
        """
        text = named or str(_package_of_project(Path.cwd()))
        folder = Path(text)
        if folder.is_dir() and not (folder / "__init__.py").is_file() and not _is_module(text):
            if not (folder / "pyproject.toml").is_file():
                raise _not_a_package(text, "a folder without `__init__.py`", _packages_in(folder))
            folder = _package_of_project(folder)
        if (folder / "__init__.py").is_file():
            text = import_file(folder / "__init__.py").__name__
        target = Target.of(text)
        if target.is_file or target.name is not None:
            raise _not_a_package(text, "a file" if target.is_file else f"the operator `{target.name}`")
        broken: list[errors.ModuleImportError] = []
        module = target.module(broken)
        file = getattr(module, "__file__", None)
        root = package_of(file)
        if root is None:
            got = f"the file {file}, which is in no package" if file else "a folder without `__init__.py`"
            raise _not_a_package(text, got)
        assert file is not None
        is_package = Path(file).name == "__init__.py"
        inside = Path(file).resolve().parent if is_package else Path(file).resolve()
        kernels = tuple(
            dict.fromkeys(
                kernel.given
                for operator in declared_operators()
                for kernel in operator.specification.kernels
                if isinstance(kernel.given, BuiltKernel)
                and language_of(kernel.given) is not None
                and _is_inside(kernel.given, inside)
            )
        )
        return cls(module.__name__, root, kernels, whole=inside == root, broken=tuple(broken))

    def by_language(self) -> dict[Language, list[BuiltKernel[Any]]]:
        """Return the kernels in each language, opsmith's own languages first."""
        found: dict[Language, list[BuiltKernel[Any]]] = {each: [] for each in own_languages()}
        for kernel in self.kernels:
            language = language_of(kernel)
            if language is not None:
                found.setdefault(language, []).append(kernel)
        return {language: kernels for language, kernels in found.items() if kernels}


def _is_inside(kernel: BuiltKernel[Any], inside: Path) -> bool:
    return kernel.declared is not None and Path(kernel.declared).resolve().is_relative_to(inside)


def _is_module(text: str) -> bool:
    """Return True if an import of this name finds a module with a file; a bare folder has no file."""
    found = find_module(text) if all(map(str.isidentifier, text.split("."))) else None
    return found is not None and found.has_location


def _packages_in(folder: Path) -> list[Path]:
    """Return the packages in a folder or in its `src`, except packages that projects do not ship."""
    found = [
        path.parent for start in (folder / "src", folder) for path in sorted(start.glob("*/__init__.py"))
    ]
    return [each for each in found if each.name not in ("tests", "docs", "examples")]


def _not_a_package(text: str, got: str, likely: Sequence[Path] = ()) -> errors.UsageError:
    return errors.UsageError(
        f"`{text}` is not a package",
        argument="package",
        expected="a package with `__init__.py`, so that built kernels can be stored in it",
        got=got,
        hint=f"name {' or '.join(f'`{path}`' for path in likely)}"
        if likely
        else "name the package as Python imports it, or its folder",
    )


def _incomplete(package: SourcePackage) -> errors.ModuleImportError:
    """Return the error for a package with a module that cannot be imported."""
    first = package.broken[0]
    modules = dict.fromkeys(kernel.operator.specification.module for kernel in package.kernels)
    parts = [name for name in modules if name != package.name]
    also = f"; or build a single module, such as `{parts[0]}`" if parts else ""
    return errors.ModuleImportError(first.problem, got=first.got, hint=f"{first.hint}{also}")


def _package_of_project(project: Path) -> Path:
    """Return the folder of the package of a project.

    Raises:
        UsageError: If the package cannot be determined.
    """
    folders = [each for each in (project / "src", project) if each.is_dir()]
    file = project / "pyproject.toml"
    name = ""
    if file.is_file():
        try:
            name = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {}).get("name", "")
        except (ValueError, AttributeError):
            name = ""  # the build tool of the project reports this error
    named = [folder / re.sub(r"[-.]+", "_", str(name)) for folder in folders if name]
    found = [each for each in named if (each / "__init__.py").is_file()]
    found = found or _packages_in(project)
    if len(found) != 1:
        raise errors.UsageError(
            "no package is named, and the current directory does not determine the package",
            argument="package",
            expected="a project with a package of the same name, in `src` or next to `pyproject.toml`",
            got=", ".join(f"`{each.name}`" for each in found) or f"no package in {project}",
            hint="name the package: `opsmith build mypackage`",
        )
    return found[0]
