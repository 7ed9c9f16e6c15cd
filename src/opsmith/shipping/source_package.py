"""Package whose kernels are built: its folder, and the kernels that its files declare."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from opsmith import errors
from opsmith.build.packaged import package_of
from opsmith.core.kernels import BuiltKernel
from opsmith.declaration import declared_operators
from opsmith.kernels.cpp.kernel import CppKernel
from opsmith.kernels.cuda.kernel import CudaKernel
from opsmith.kernels.triton.kernel import TritonKernel
from opsmith.targets import Target
from opsmith.targets.target import import_file

K = TypeVar("K", bound="CppKernel | CudaKernel | TritonKernel")


@dataclass(frozen=True)
class SourcePackage:
    """Package whose kernels are built.

    Attributes:
        name: Name of the module.
        root: Folder of the outermost package, which gets the built kernels.
        kernels: Kernels from a source that files of the module declare.
        whole: True if the module is the outermost package; False if it is a part of it.
    """

    name: str
    root: Path
    kernels: tuple[CppKernel | CudaKernel | TritonKernel, ...]
    whole: bool = True

    @classmethod
    def of(cls, named: str | None = None) -> SourcePackage:
        """Import a package and collect its kernels.

        Args:
            named: Name of a module in a package, or path of the package's folder; None for the package of the
                project in the current directory.

        Raises:
            UsageError: If it is no package, or the project has no package that can be found.
            OperatorNotFoundError: If there is no such module, or it has no kernels from a source.
            ModuleImportError: If it cannot be imported.
        """
        text = named or str(_package_of_project(Path.cwd()))
        folder = Path(text)
        if (folder / "__init__.py").is_file():
            text = import_file(folder / "__init__.py").__name__
        elif folder.is_dir() and re.fullmatch(r"[\w.]+", text) is None:
            raise _not_a_package(text, "a folder without `__init__.py`")
        target = Target.of(text)
        if target.is_file or target.name is not None:
            raise _not_a_package(text, "a file" if target.is_file else f"the operator `{target.name}` of one")
        module = target.module()
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
                if isinstance(kernel.given, CppKernel | CudaKernel | TritonKernel)
                and _is_inside(kernel.given, inside)
            )
        )
        if not kernels:
            raise errors.OperatorNotFoundError(
                f"`{text}` declares no kernel from a source",
                expected="operators with a kernel in C++, CUDA C++ or Triton, in this package",
                hint="import the module that declares them in the package; kernels in Python are not built",
            )
        return cls(module.__name__, root, kernels, whole=inside == root)

    def of_language(self, language: type[K]) -> list[K]:
        """Return the kernels in one language."""
        return [each for each in self.kernels if isinstance(each, language)]


def _is_inside(kernel: BuiltKernel[Any], inside: Path) -> bool:
    return kernel.declared is not None and Path(kernel.declared).resolve().is_relative_to(inside)


def _not_a_package(text: str, got: str) -> errors.UsageError:
    return errors.UsageError(
        f"`{text}` is not a package",
        argument="package",
        expected="a package, with `__init__.py`, which can hold built kernels",
        got=got,
        hint="name the package as Python imports it, or its folder",
    )


def _package_of_project(project: Path) -> Path:
    """Return the folder of the package of a project.

    Raises:
        UsageError: If there is none that can be told.
    """
    folders = [each for each in (project / "src", project) if each.is_dir()]
    file = project / "pyproject.toml"
    name = ""
    if file.is_file():
        try:
            name = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {}).get("name", "")
        except (ValueError, AttributeError):
            name = ""  # whoever builds the project learns of it
    named = [folder / re.sub(r"[-.]+", "_", str(name)) for folder in folders if name]
    found = [each for each in named if (each / "__init__.py").is_file()]
    if not found:
        found = [each.parent for folder in folders for each in sorted(folder.glob("*/__init__.py"))]
        found = [each for each in found if each.name not in ("tests", "docs", "examples")]
    if len(found) != 1:
        raise errors.UsageError(
            "no package is named, and the current directory does not say which",
            argument="package",
            expected="a project whose package has its name, in `src` or beside `pyproject.toml`",
            got=", ".join(f"`{each.name}`" for each in found) or f"no package in {project}",
            hint="name the package: `opsmith build mypackage`",
        )
    return found[0]
