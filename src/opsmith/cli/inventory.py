"""Packages and programs that opsmith uses, and how to install them. This module needs only torch."""

from __future__ import annotations

import ctypes.util
import importlib.util
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch

import opsmith
from opsmith import config, errors
from opsmith.build.packaged import package_of, packaged_in
from opsmith.build.processor import best_level
from opsmith.build.toolchain import find_toolchain
from opsmith.extras import install
from opsmith.kernels.languages import installed_keys, language
from opsmith.torch_library.calls.own_build import why_not
from opsmith.torch_library.calls_extension import calls_extension
from opsmith.torch_library.calls_extension import target as calls_target


@dataclass(frozen=True)
class InventoryItem:
    """One package or program that opsmith uses.

    Args:
        name: Its name.
        found: Version or location; None if it is missing.
        serves: Features that need it.
        hint: Command or page to install it. required: True if nothing works without it.
    """

    name: str
    found: str | None
    serves: str
    hint: str
    required: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the item in JSON's types, with a hint only if it is missing."""
        return {**asdict(self), "hint": None if self.found else self.hint}


def inventory() -> list[InventoryItem]:
    """Look up every item."""
    return [
        *(entry() for entry in ENTRIES),
        *_of_languages(),
        *(entry() for entry in OF_FEATURES),
    ]


def _python() -> InventoryItem:
    version = platform.python_version()
    found = version if sys.version_info >= (3, 11) else None
    return InventoryItem(
        "Python", found, "everything", f"install Python 3.11 or newer (this is {version})", True
    )


def _torch() -> InventoryItem:
    version = torch.__version__
    new_enough = tuple(int(part) for part in version.split("+")[0].split(".")[:2]) >= (2, 11)
    hint = f"pip install --upgrade 'torch>=2.11' (this is {version})"
    return InventoryItem("torch", version if new_enough else None, "everything", hint, True)


def _compiler() -> InventoryItem:
    hints = {
        "Linux": "sudo apt-get install g++, or your distribution's package",
        "Darwin": "xcode-select --install",
        "Windows": "winget install Microsoft.VisualStudio.2022.BuildTools",
    }
    hint, found = hints.get(platform.system(), "install g++ or clang++"), None
    try:
        toolchain = find_toolchain()
        toolchain.refuse_unfit()
        found = version_of(*toolchain.command)
    except errors.ToolchainError as error:
        if config.compiler():
            hint = f"{error.problem}: {error.got}; name your compiler in CXX, or unset CXX"
    return InventoryItem("C++ compiler", found, "C++ kernels; torch.compile on the CPU", hint)


def _built_kernels() -> InventoryItem:
    found = sorted(each.target for each in packaged_in(package_of(opsmith.__file__)) if each.operator)
    level = best_level()
    here = f"this processor has {level}" if level else "no level of this processor is known"
    return InventoryItem(
        "built kernels",
        f"for {', '.join(dict.fromkeys(found))}; {here}" if found else None,
        "kernels of opsmith's own operators, which need no C++ compiler",
        "install opsmith's wheel for this platform; with a C++ compiler they are built when called",
    )


def _calls() -> InventoryItem:
    extension, reason = calls_extension(), why_not()
    own = f"does not build them by itself: {reason}" if reason else "builds them by itself"
    return InventoryItem(
        "calls in C++",
        None if extension is None else f"for {calls_target()}",
        "calls and backwards of small tensors in less time",
        f"{config.PYTHON_CALLS} turns calls in C++ off: unset this variable"
        if config.calls_in_python()
        else f"opsmith build --calls, which needs a C++ compiler and a minute; a process of many calls {own}",
    )


def _cuda() -> InventoryItem:
    found = None
    if torch.cuda.is_available():
        found = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    built = torch.version.cuda or torch.version.hip
    hint = (
        "nvidia-smi shows whether the driver sees a GPU"
        if built
        else "this torch is built for the CPU: pytorch.org/get-started gives the command for your GPU"
    )
    return InventoryItem("GPU", found, "CUDA kernels; check on the GPU", hint)


def _of_languages() -> Iterator[InventoryItem]:
    """Yield the packages that kernel languages need, including languages from plug-in packages."""
    for key in installed_keys():
        try:
            found = language(key)
            for part in () if found is None else found.parts():
                version = _package(part.package) or (part.library and ctypes.util.find_library(part.library))
                yield InventoryItem(part.name, version or None, part.serves, part.hint)
        except errors.OpsmithError as error:
            yield InventoryItem(key, None, f"kernels by `{key}=`", f"{error.problem}: {error.hint}")


def _of_package(name: str, package: str, serves: str, hint: str) -> Callable[[], InventoryItem]:
    return lambda: InventoryItem(name, _package(package), serves, hint)


ENTRIES: tuple[Callable[[], InventoryItem], ...] = (
    _python,
    _torch,
    _of_package("rich", "rich", "the command line; check", install("cli")),
    _of_package("typer", "typer", "the command line", install("cli")),
    _compiler,
    _built_kernels,
    _calls,
    _cuda,
)
OF_FEATURES: tuple[Callable[[], InventoryItem], ...] = (
    _of_package("ONNX", "onnx", "export", "pip install onnx"),
    _of_package("ONNX Script", "onnxscript", "export", "pip install onnxscript"),
    _of_package("ONNX Runtime", "onnxruntime", "export: run the exported model", "pip install onnxruntime"),
    _of_package("pygraphviz", "pygraphviz", "draw: SVG, PNG and PDF", install("draw")),
    _of_package("matplotlib", "matplotlib", "benchmark: --plot", install("benchmark")),
    _of_package("MCP", "mcp", "mcp", install("mcp")),
    _of_package("scikit-learn", "scikit-learn", "tour", install("tour")),
)


def _package(name: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        # Some builds, such as packages of a distribution, have no metadata.
        module = name.replace("-", "_")
        return "installed" if importlib.util.find_spec(module) is not None else None


def version_of(*command: str) -> str:
    """Return the line with the version that a program prints, or else the command."""
    try:
        answer = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return shlex.join(command)
    lines = (answer.stdout or answer.stderr).strip().splitlines()
    return next((line.strip() for line in lines if re.search(r"\d+\.\d+", line)), shlex.join(command))
