"""Importing what a command names: a `.py` file under the name that its package gives it, or a module."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

from opsmith import errors

LAST_LINES = 3
"""How many calls of a traceback a message shows."""


def import_module(name: str) -> ModuleType:
    """Import a module, and those inside it, as `python -m` would find it: from the current directory too."""
    _reach(Path.cwd())
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    except Exception as error:  # finding a submodule imports its package
        raise _broken(name, error) from error
    if found is None:
        hint = f"; did you mean `{name}.py`?" if Path(f"{name}.py").exists() else ""
        raise errors.OperatorNotFoundError(
            f"there is no module `{name}`{hint}",
            expected="the path of a `.py` file, or a module that can be imported from here",
            hint="look at the spelling, and whether it is installed in this environment",
        )
    module = _guarded(name, partial(importlib.import_module, name))
    for inner in pkgutil.walk_packages(getattr(module, "__path__", None) or [], f"{name}."):
        if not inner.name.endswith(".__main__"):  # which is a program, and would run
            _guarded(inner.name, partial(importlib.import_module, inner.name))
    return module


def import_file(path: Path) -> ModuleType:
    """Import a file under the name that its own package gives it, so that nothing is declared twice."""
    if not path.is_file():
        raise errors.OperatorNotFoundError(
            f"there is no file `{path}`", hint="look at the spelling, and at the current directory"
        )
    path = path.resolve()
    root, parts = path.parent, [] if path.name == "__init__.py" else [path.stem]
    while (root / "__init__.py").exists():
        parts.insert(0, root.name)
        root = root.parent
    _reach(root)
    name = ".".join(parts)
    known = sys.modules.get(name)
    if known is not None and _file_of(known) == path:
        return known
    if len(parts) > 1:
        return _guarded(str(path), partial(importlib.import_module, name))
    return _guarded(str(path), partial(_execute, path, name if known is None else f"file_{name}"))


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
        raise  # it says by itself what is wrong with which operator
    except (Exception, SystemExit) as error:
        raise _broken(what, error) from error


def _broken(what: str, error: BaseException) -> errors.ModuleImportError:
    """The error for a module that raises, with the last lines of its traceback, less those of the import."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and "importlib" not in frame.filename
    ]
    lines = traceback.format_list(frames[-LAST_LINES:]) + traceback.format_exception_only(error)
    shown = "".join(lines).rstrip().replace("\n", "\n    ")
    return errors.ModuleImportError(
        f"`{what}` cannot be imported: {type(error).__name__}",
        got=f"\n    {shown}",
        hint="fix the file so that `python` imports it, then check again",
    )
