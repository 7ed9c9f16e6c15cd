"""Extension module for calls and autograd nodes in C++: finding, compiling and loading it.

It is built for one version of Python and of torch, since it uses the internals of both. Without it, Python
does the same work.
"""

from __future__ import annotations

import os
import sysconfig
from contextlib import suppress
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from itertools import chain
from pathlib import Path
from types import ModuleType

import torch

from opsmith import config, errors
from opsmith.build.cache import CacheEntry, cache_on_disk, key_of
from opsmith.build.manifest import BuiltFile, digest_of_parts
from opsmith.build.packaged import package_of, packaged_in, search, warn_unusable
from opsmith.build.processor import machine
from opsmith.build.toolchain import Toolchain, find_toolchain

LANGUAGE = "calls"
"""Language of its file among the built kernels of a package."""
VERSION = 6
"""Version of its functions; it increases when the arguments of a function change."""
NAME = "opsmith_calls"
LIBRARY = f"{NAME}.so"
SOURCES = Path(__file__).parent / "capabilities/private/cpp"
SOURCE = SOURCES / "module.cpp"


def target() -> str:
    """Return the target of the build, such as `torch-2.13.0-cpython-311-x86_64-linux-gnu`."""
    release = torch.__version__.partition("+")[0]
    return f"torch-{release}-{sysconfig.get_config_var('SOABI')}"


def source_digest() -> str:
    """Return the digest of its source."""
    sources = sorted((*SOURCES.glob("*.h"), SOURCE))
    return digest_of_parts({path.name: path.read_text(encoding="utf-8") for path in sources})


def _parts() -> dict[str, str]:
    return {"kind": LANGUAGE, "source": source_digest(), "target": target(), "machine": machine()}


_packages: list[Path | None] = [package_of(__file__)]
"""Packages with kernels next to which it may be found."""


@cache
def calls_extension() -> ModuleType | None:
    """Return the module of opsmith's own package, of the cache, or of a package with operators; or None."""
    return None if config.calls_in_python() else next(filter(None, map(_loaded, _files())), None)


def look_in(package: Path | None) -> bool:
    """Add a package that declares operators; return True if it has the module for any Python and torch."""
    if package in _packages:
        return False
    _packages.append(package)
    return any(built.language == LANGUAGE for built in packaged_in(package))


def _files() -> list[Path]:
    own, *others = map(_files_of, _packages)
    entry = cached_calls()
    cached = [entry.directory / LIBRARY] if entry else []
    return [*own, *cached, *chain.from_iterable(others)]


def _files_of(package: Path | None) -> list[Path]:
    found = search(package, LANGUAGE, "", source_digest, VERSION, _misfit)
    return [path for _, path, _ in found.usable()]


def _misfit(built: BuiltFile) -> str | None:
    """Return the reason why a built file does not fit here; None if it fits."""
    return built.misfit or (None if built.target == target() else f"`{built.file}` is for {built.target}")


def _loaded(path: Path) -> ModuleType | None:
    """Load a file; return None, with a warning, if the system cannot load it."""
    loader = ExtensionFileLoader(NAME, str(path))
    spec = spec_from_loader(NAME, loader)
    assert spec is not None
    try:
        module = module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        warn_unusable(path, str(error))
        return None
    return module


def cached_calls() -> CacheEntry | None:
    """Return the cache entry, if it exists and only this user can write into the cache."""
    with suppress(errors.CacheError):
        return cache_on_disk().find(_parts())
    return None


def compile_calls() -> CacheEntry:
    """Compile the extension into the cache, once on a machine; it takes a minute.

    Raises:
        ToolchainError: If there is no compiler, it lacks Python's headers, or it does not compile the source.
        CacheError: As for `Cache.obtain`.
    """
    with suppress(OSError):  # the cache reports a fault of its folder
        _failure().unlink()
    toolchain = find_toolchain()
    include = Path(sysconfig.get_paths()["include"])
    if not (include / "Python.h").is_file():
        raise errors.ToolchainError(
            "calls in C++ cannot be compiled without Python's headers",
            expected=f"the file {include / 'Python.h'}",
            got="no such file",
            hint="install Python's headers; on Debian or Ubuntu: `apt-get install python3-dev`",
        )
    return cache_on_disk().obtain(_parts(), lambda directory: _compile(toolchain, include, directory))


def compile_unless_it_failed() -> None:
    """Compile the extension, unless an earlier process failed to compile it; note the reason of a failure."""
    if earlier_failure():
        return
    try:
        compile_calls()
    except errors.OpsmithError as error:
        _failure().parent.mkdir(parents=True, exist_ok=True)
        _failure().write_text(f"{error.problem}\n", encoding="utf-8")


def earlier_failure() -> str:
    """Return the reason why a build of this source failed on this machine; empty if it did not fail."""
    file = _failure()
    return file.read_text(encoding="utf-8").strip() if os.path.isfile(file) else ""


def _failure() -> Path:
    return config.cache_directory() / "calls-failed" / key_of(_parts())


def _compile(toolchain: Toolchain, include: Path, directory: Path) -> None:
    home = Path(torch.__file__).parent
    folders = (include, home / "include", home / "include" / "torch" / "csrc" / "api" / "include")
    arguments = [
        *["-std=c++20", "-O2", "-g0", "-DNDEBUG", "-fPIC", "-shared", "-fvisibility=hidden", "-w", "-Wl,-s"],
        *(f"-isystem{folder}" for folder in folders),
        # Messages contain file names, but a wheel must not contain folders of the machine that built it.
        *(f"-ffile-prefix-map={folder}=." for folder in (SOURCES, *folders)),
        *(str(SOURCE), f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python", "-o", LIBRARY),
    ]
    expected = "a C++20 compiler, such as g++ 11 or clang 14, and the headers of torch"
    without = "; without them, Python does the same work"
    toolchain.build("calls in C++", arguments, directory, expected, without)
