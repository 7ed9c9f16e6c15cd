"""Write a new package from the template: names, optional parts, licence, and the source of opsmith."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import shutil
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

import opsmith
from opsmith import errors
from opsmith.declaration import check_name
from opsmith.display import short_repr
from opsmith.scaffolding.opsmith_source import OpsmithSource, opsmith_source

HERE = Path(__file__).parent
TEMPLATE = HERE / "template"
MODULE, DISTRIBUTION = "my_kernels", "my-kernels"
"""Names in the template: of the module, and of the distribution that `pip` installs."""
HIDDEN = ("gitignore", "github")
"""Names in the template that get a leading dot: with the dot they would affect the template itself."""
IGNORED = ("__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache")
LICENCES = ("MIT", "Apache-2.0", "BSD-3-Clause", "none")
"""Licences to choose from, by their SPDX identifiers."""
LONGEST = 60
"""Maximum number of characters of a name: a longer name makes lines of the template too long."""

_NAME = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")
_MARK = re.compile(r"(?:#|<!--) <(?P<end>/?)(?P<part>\w+)>(?: -->)?")


@dataclass(frozen=True, slots=True)
class NewPackage:
    """A package that was written.

    Attributes:
        folder: Its folder.
        module: Name that Python imports.
        files: Paths of its files in the folder, sorted.
        source: Source from which its dependencies install opsmith.
    """

    __repr__ = short_repr

    folder: Path
    module: str
    files: tuple[str, ...]
    source: OpsmithSource


def new_package(
    name: str, folder: Path | None = None, *, cuda: bool = True, ci: bool = True, licence: str = "MIT"
) -> NewPackage:
    """Write a package with an operator, its kernels, tests and settings of the tools.

    Args:
        name: Name of the package; a hyphen becomes an underscore in the name that Python imports.
        folder: Folder to make; by default a folder of this name in the current one.
        cuda: True for a kernel in CUDA C++.
        ci: True for a workflow of GitHub Actions.
        licence: One of `LICENCES`.

    Returns:
        The package.

    Raises:
        UsageError: If the name is not a valid package name or is taken, the folder exists already or cannot
            be written, or there is no such licence. Nothing is written then.

    Example:
        >>> import tempfile
        >>> package = new_package("fast-math", Path(tempfile.mkdtemp()) / "fast-math", cuda=False)
        >>> package.module, package.files[-2:]
        ('fast_math', ('src/fast_math/swish.cpp', 'tests/test_ops.py'))
    """
    module = _module_name(name)
    if licence not in LICENCES:
        same = [each for each in LICENCES if each.lower() == licence.lower()]
        raise errors.UsageError(
            f"there is no licence `{licence}` to choose",
            argument="--licence",
            expected=", ".join(LICENCES),
            got=licence,
            hint=f"take `{same[0]}`" if same else "choose `none`, and add your own licence later",
        )
    target = _new_folder(Path(name) if folder is None else folder)
    source = opsmith_source()
    parts = {
        "cuda": cuda,
        "licence": licence != "none",
        "reference": bool(source.reference),
        "unreachable": not source.reachable,
        "uninstallable": not (source.reference or source.indexed),
    }
    versions = version_range(opsmith.__version__)
    origin = f" @ {source.reference}" if source.reference else ""
    words = {
        MODULE: module,
        DISTRIBUTION: name,
        "LICENCE": licence,
        "REFERENCE": source.reference,
        "opsmith>=VERSION": f"opsmith{versions}",
        "opsmith[cli,cuda]": f"opsmith[cli{',cuda' if cuda else ''}]{origin or versions}",
        "opsmith[cli,cuda,test]": f"opsmith[cli,{'cuda,' if cuda else ''}test]{origin}",
    }
    files = {
        _renamed(path, module): _filled(path.read_text(encoding="utf-8"), parts, words)
        for path in _template_files()
        if not (path.suffix == ".cu" and not cuda) and not ("github" in path.parts and not ci)
    }
    if licence != "none":
        files["LICENSE"] = _licence_text(licence, name)
    _write(target, files)
    return NewPackage(target, module, tuple(sorted(files)), source)


def version_range(version: str) -> str:
    """Return the range of versions for the dependency: before 1.0, a minor version may break something.

    Example:
        >>> version_range("0.1.3"), version_range("2.5.0")
        ('>=0.1,<0.2', '>=2.5,<3')
    """
    major, minor = map(int, version.split(".")[:2])
    return f">={major}.{minor},<{major + 1}" if major else f">=0.{minor},<0.{minor + 1}"


def _module_name(name: str) -> str:
    """Return the name that Python imports.

    Raises:
        UsageError: If it is not a valid name, or Python, torch or an installed package uses it.
    """
    if not _NAME.fullmatch(name) or len(name) > LONGEST:
        likely = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789")[:LONGEST]
        raise errors.UsageError(
            f"`{name}` is not a valid package name",
            argument="NAME",
            expected="small letters and digits, with single `-` or `_` between them; the first character is "
            f"a letter; at most {LONGEST} characters",
            got=repr(name),
            hint=f"take `{likely}`" if _NAME.fullmatch(likely) else "take a name such as `fast-attention`",
        )
    module = name.replace("-", "_")
    taken = _owner(module)
    if taken is not None:
        raise errors.UsageError(
            f"a package cannot be named `{name}`: {taken}",
            argument="NAME",
            expected="a name that is not in use",
            got=name,
            hint=f"choose a different name, such as `{name}-kernels`",
        )
    return module


def _owner(module: str) -> str | None:
    """Describe the module, package or keyword that has this name already; None if the name is free."""
    if keyword.iskeyword(module):
        return f"`{module}` is a word of Python's syntax"
    if module not in HIDDEN and (TEMPLATE / module).is_dir():
        return f"the folder `{module}` of the new package would have the same name"
    if module in sys.stdlib_module_names:
        return f"Python has a module `{module}`"
    try:
        check_name(f"{module}::swish", hint="")
        torch.library.Library(module, "DEF")  # a namespace can be defined only once
    except (errors.NameFormatError, RuntimeError):
        return f"torch has operators in a namespace `{module}`"
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:  # a folder without `__init__.py` has no origin
        return None
    return f"`import {module}` finds {found.origin}"


def _new_folder(folder: Path) -> Path:
    """Return the folder to make.

    Raises:
        UsageError: If it exists already, or cannot be made.
    """
    if os.path.lexists(folder):
        what = "a folder" if folder.is_dir() else "a file"
        raise _unwritable(
            folder, f"{what} of this name exists already", "name a different folder: `opsmith new NAME DIR`"
        )
    parent = folder.absolute().parent
    if not parent.is_dir():
        raise _unwritable(folder, f"there is no folder `{parent}`", "make that folder first")
    return folder


def _unwritable(folder: Path, got: str, hint: str) -> errors.UsageError:
    return errors.UsageError(
        f"the package cannot be written to `{folder}`",
        argument="DIR",
        expected="a folder that does not exist yet, inside a folder that can be written to",
        got=got,
        hint=hint,
    )


def _template_files() -> list[Path]:
    found = (path for path in TEMPLATE.rglob("*") if path.is_file() and not {*IGNORED} & {*path.parts})
    return sorted(found)


def _renamed(path: Path, module: str) -> str:
    """Return the path of a template's file in the package."""
    first, *rest = path.relative_to(TEMPLATE).parts
    parts = [f".{first}" if first in HIDDEN else first, *rest]
    return "/".join(module if part == MODULE else part for part in parts)


def _filled(text: str, parts: dict[str, bool], words: dict[str, str]) -> str:
    """Remove the unwanted parts from a text, and replace the template's names by the package's.

    A part is enclosed by the lines `# <part>` and `# </part>`, or by the same in HTML comments.

    Example:
        >>> _filled("a\\n# <b>\\nb\\n# </b>\\n# <c>\\nc\\n# </c>\\n", {"b": True, "c": False}, {"a": "A"})
        'A\\nb\\n'
    """
    kept: list[str] = []
    left_out: list[str] = []
    for line in text.splitlines(keepends=True):
        mark = _MARK.fullmatch(line.strip())
        if mark is None:
            kept += [] if left_out else [line]
        elif not parts[mark["part"]]:
            left_out = left_out[:-1] if mark["end"] else [*left_out, mark["part"]]
    pattern = re.compile("|".join(map(re.escape, words)))
    return pattern.sub(lambda found: words[found[0]], "".join(kept))


def _licence_text(licence: str, name: str) -> str:
    text = (HERE / "licences" / f"{licence}.txt").read_text(encoding="utf-8")
    return text.replace("YEAR", str(date.today().year)).replace("HOLDER", f"the authors of {name}")


def _write(folder: Path, files: dict[str, str]) -> None:
    """Write the files into a new folder: all of them or none.

    Raises:
        UsageError: If the system refuses, with its reason.
    """
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        draft.mkdir()
        try:
            for name, text in files.items():
                path = draft / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)  # after the renaming it does not exist
    except OSError as error:
        raise _unwritable(folder, error.strerror or str(error), "name a different folder") from error
