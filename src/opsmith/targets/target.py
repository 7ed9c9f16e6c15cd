"""Targets of the command line: import `FILE_OR_MODULE[:NAME]`, and find the operators that it names."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from opsmith import errors
from opsmith.adopting.function_class import is_function_class
from opsmith.adopting.registered import is_operator
from opsmith.core.formula import listed
from opsmith.core.operator import Operator
from opsmith.declaration import declared_operators
from opsmith.display import short_repr
from opsmith.targets.definitions import (
    attribute_of,
    classes_in,
    custom_ops_in,
    registered_as,
)

LAST_LINES = 3
"""Number of calls of a traceback that a message shows."""


def import_module(name: str, broken: list[errors.ModuleImportError] | None = None) -> ModuleType:
    """Import a module and its submodules; as for `python -m`, the current directory is searched too.

    Args:
        name: Name of the module.
        broken: List to which the errors of submodules that cannot be imported are added; None to raise the
            first error.

    Raises:
        OperatorNotFoundError: If there is no such module.
        ModuleImportError: If it cannot be imported.
    """
    found = find_module(name)
    if found is None:
        hint = f"; did you mean `{name}.py`?" if os.path.exists(f"{name}.py") else ""
        raise errors.OperatorNotFoundError(
            f"there is no module `{name}`{hint}",
            expected="the path of a `.py` file, or a module that can be imported from here",
            hint="check the spelling, and that the module is installed in this environment",
        )
    module = _guarded(name, partial(importlib.import_module, name))
    for inner in _submodules(module):
        try:
            _guarded(inner, partial(importlib.import_module, inner))
        except errors.ModuleImportError as error:
            if broken is None:
                raise
            broken.append(error)
    return module


def find_module(name: str) -> ModuleSpec | None:
    """Find a module as an import from the current directory does; None if there is none.

    Raises:
        ModuleImportError: If the package that contains it cannot be imported.
    """
    _reach(Path.cwd())
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    except Exception as error:  # finding a submodule imports its package
        raise _broken(name, error) from error


def _submodules(module: ModuleType, seen: Sequence[str] = ()) -> Iterator[str]:
    """Yield the names of the modules in a package, at every depth, except programs and shared libraries.

    Importing `__main__` would run a program. A shared library in a package, such as a library that a kernel
    links, is named like an extension module, but has no function by which Python could import it.

    Args:
        module: The package, or a module.
        seen: Folders that were searched already, and are not searched again.
    """
    folders = [each for each in getattr(module, "__path__", None) or [] if each not in seen]
    for inner in pkgutil.iter_modules(folders, f"{module.__name__}."):
        short = inner.name.rpartition(".")[2]
        spec = inner.module_finder.find_spec(inner.name, None)
        loader = None if spec is None else spec.loader
        foreign = isinstance(loader, ExtensionFileLoader) and (
            f"PyInit_{short}".encode() not in Path(loader.path).read_bytes()
        )
        if short == "__main__" or foreign:
            continue
        yield inner.name
        package = sys.modules.get(inner.name) if inner.ispkg else None  # the caller has imported it
        if package is not None:
            yield from _submodules(package, (*seen, *folders))


def import_file(path: Path) -> ModuleType:
    """Import a file under the name that it has in its package, so that nothing is declared twice."""
    if not os.path.isfile(path):
        raise errors.OperatorNotFoundError(
            f"there is no file `{path}`", hint="check the spelling, and the current directory"
        )
    path = path.resolve()
    root, parts = path.parent, [] if path.name == "__init__.py" else [path.stem]
    while (root / "__init__.py").exists():
        parts.insert(0, root.name)
        root = root.parent
    _reach(root)
    name = ".".join(parts)
    while (known := sys.modules.get(name)) is not None:
        if _file_of(known) == path:
            return known
        name = f"file_{name}"  # of a different file of the same name
    if len(parts) > 1 and name == ".".join(parts):
        return _guarded(str(path), partial(importlib.import_module, name))
    return _guarded(str(path), partial(_execute, path, name))


def _execute(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _reach(directory: Path) -> None:
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None


def _guarded(what: str, load: Callable[[], ModuleType]) -> ModuleType:
    try:
        return load()
    except errors.OpsmithError:
        raise  # its message is complete
    except (Exception, SystemExit) as error:
        raise _broken(what, error) from error


def _broken(what: str, error: BaseException) -> errors.ModuleImportError:
    """Return the error for a module that raises, with the last lines of its traceback."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and "importlib" not in frame.filename
    ]
    lines = traceback.format_list(frames[-LAST_LINES:]) + traceback.format_exception_only(error)
    shown = "".join(lines).rstrip().replace("\n", "\n    ")
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    return errors.ModuleImportError(
        f"`{what}` cannot be imported: {type(error).__name__}",
        got=f"\n    {shown}",
        hint=f"install the package with the module `{missing}`, or correct the import"
        if missing
        else "fix the file so that `python` imports it",
    )


def nothing_declared(*folders: str) -> errors.OperatorNotFoundError:
    """Return the error for folders without anything to check."""
    named = f"the folder{'s' * (len(folders) > 1)} {listed(folders)}"
    if not any(file for folder in folders for file in Path(folder).rglob("*.py")):
        return errors.OperatorNotFoundError(
            f"there is no Python file in {named}", hint="name a file, a module, or a folder with Python files"
        )
    return errors.OperatorNotFoundError(
        f"no Python file in {named} declares an operator, Function or custom op",
        hint='declare one with `@opsmith.operator("mylib::name")`, or name the folder that contains one',
    )


_FILE = re.compile(r"(?P<source>.+?\.py)(?::(?P<name>.+))?")
_MODULE = re.compile(r"(?P<source>[^\W\d]\w*(?:\.[^\W\d]\w*)*)(?::(?P<name>.+))?")


@dataclass(frozen=True)
class Target:
    """A target of the command line.

    Args:
        source: Path of a `.py` file, or name of a module.
        name: Name of an operator in it; None for all.
        optional: True if it may declare nothing to check; so for a file that a folder names.
    """

    __repr__ = short_repr

    source: str
    name: str | None
    optional: bool = field(default=False, repr=False)

    @classmethod
    def of(cls, text: str) -> Target:
        """Parse a target.

        Raises:
            UsageError: If the text is neither a file nor a module.

        Example:
            >>> Target.of("my/operators.py:demo::linear")
            Target(source='my/operators.py', name='demo::linear')
        """
        found = _FILE.fullmatch(text) or _MODULE.fullmatch(text)
        if found is None:
            raise errors.UsageError(
                f"`{text}` names neither a file nor a module",
                expected="FILE_OR_MODULE[:NAME]",
                hint="write `operators.py`, `operators.py:linear`, `mypackage.operators` or "
                "`mypackage.operators:linear`",
            )
        return cls(found["source"], found["name"])

    @property
    def is_file(self) -> bool:
        """True if the source is a file."""
        return self.source.endswith(".py")

    def module(self, broken: list[errors.ModuleImportError] | None = None) -> ModuleType:
        """Import the source.

        Args:
            broken: See `import_module`.

        Raises:
            OperatorNotFoundError: If there is no such file or module.
            ModuleImportError: If it cannot be imported.
        """
        return import_file(Path(self.source)) if self.is_file else import_module(self.source, broken)

    def operators(self) -> list[Operator[..., Any]]:
        """Return the operators that the target names, in the order of their declaration.

        Raises:
            OperatorNotFoundError: If there is no such file, module or operator.
            ModuleImportError: If it cannot be imported.
        """
        module = self.module()
        found = _declared(module)
        if self.name is not None:
            known = _known(module, found)
            if self.name not in known:
                raise self._unadopted(module) or self._unknown(known, {})
            return [known[self.name]]
        if not found:
            raise self._none(module)
        return found

    def checkable(self) -> dict[str, Any]:
        """Return the objects to check by name: the operators, or if there are none, Functions and custom ops.

        A name may be the name of an operator, of an `autograd.Function` class, or of a torch.library
        operator: its variable or `namespace::name`. Without a name, all operators that the module declares
        are returned; if there are none, its Functions and its `custom_op` objects. An optional target may
        have nothing to check.

        Raises:
            OperatorNotFoundError: If there is no such file, module or name, or nothing to check.
            ModuleImportError: If it cannot be imported.
        """
        module = self.module()
        found = _declared(module, inside=not self.optional)
        others = self._others(module)
        if self.name is not None:
            known = _known(module, found)
            if self.name in known:
                return {known[self.name].name: known[self.name]}
            value = attribute_of(module, self.name)
            if value is None:
                value = registered_as(self.name)
            if is_function_class(value) or is_operator(value):
                return {self.name: value}
            raise self._unknown(known, others)
        if found:
            return {operator.name: operator for operator in found}
        if not others and not self.optional:
            raise self._none(module)
        return others

    def unadopted(self) -> dict[str, Any]:
        """Return the unadopted Functions and custom ops of a module that also declares operators."""
        module = self.module()
        found = _declared(module, inside=not self.optional)
        if self.name is not None or not found:
            return {}
        adopted = [each.specification.origin.subject for each in found]
        return {name: each for name, each in self._others(module).items() if each not in adopted}

    def _others(self, module: ModuleType) -> dict[str, Any]:
        """Return the objects that can be checked, but are not operators of opsmith."""
        inside = not self.is_file
        return {**classes_in(module, inside=inside), **custom_ops_in(module, inside=inside)}

    def _none(self, module: ModuleType) -> errors.OperatorNotFoundError:
        classes = self._others(module)
        folders = [] if getattr(module, "__file__", None) else getattr(module, "__path__", [])
        if folders and not classes:  # without `__init__.py`
            return nothing_declared(*map(os.path.relpath, folders))
        functions = all(map(is_function_class, classes.values()))
        what = "Functions" if functions else "Functions and custom ops"
        also = f", but the {what} {listed(list(classes))}" if classes else ", Function or custom op"
        return errors.OperatorNotFoundError(
            f"`{self.source}` declares no operator{also}",
            hint="adopt one with `opsmith.adopt(...)`; `opsmith adopt` writes the line for each Function"
            if classes
            else 'declare one with `@opsmith.operator("mylib::name")`, or name the module that declares one',
        )

    def _unadopted(self, module: ModuleType) -> errors.OperatorNotFoundError | None:
        """Return the error for a Function or a custom op that has to be adopted first."""
        value = attribute_of(module, str(self.name))
        function = is_function_class(value)
        if not function and not is_operator(value):
            return None
        return errors.OperatorNotFoundError(
            f"`{self.name}` of `{self.source}` is {'an autograd.Function' if function else 'a custom op'}, "
            "and is not adopted",
            expected="an operator of opsmith",
            hint=f"adopt it first: `opsmith adopt {self.source}:{self.name}` writes the line. Then name the "
            f"operator"
            if function
            else "adopt it first with `opsmith.adopt(...)`, then name the operator",
        )

    def _unknown(
        self, known: dict[str, Operator[..., Any]], others: dict[str, Any]
    ) -> errors.OperatorNotFoundError:
        available = list(dict.fromkeys(operator.name for operator in known.values())) + list(others)
        return errors.OperatorNotFoundError(
            f"`{self.source}` has no operator `{self.name}`",
            expected=f"one of {listed(available)}" if available else "an operator; the module has none",
            hint="name the operator, or its variable",
        )


def _declared(module: ModuleType, *, inside: bool = True) -> list[Operator[..., Any]]:
    """Return the operators that a module declares; with `inside` also the operators of its submodules."""
    owners = [(each, f"{each.specification.module}.") for each in declared_operators()]
    prefix = f"{module.__name__}."
    return [each for each, owner in owners if owner == prefix or (inside and owner.startswith(prefix))]


def _known(module: ModuleType, found: list[Operator[..., Any]]) -> dict[str, Operator[..., Any]]:
    """Return the operators by every name that a user may write: short name, full name, and variables."""
    variables = {name: value for name, value in vars(module).items() if isinstance(value, Operator)}
    known = {operator.specification.short_name: operator for operator in found}
    return known | {operator.name: operator for operator in found} | variables
