"""What this machine has that opsmith uses: for each thing what it is for, and how to get it."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from opsmith.extras import install


@dataclass(frozen=True)
class Entry:
    """One thing that opsmith uses.

    Args:
        name: What it is called.
        found: Version or place; None where it is missing.
        serves: What it is for.
        hint: The command, or the place, that brings it.
        required: Whether nothing works without it.
    """

    name: str
    found: str | None
    serves: str
    hint: str
    required: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The entry in JSON's types; what is there needs no hint."""
        return {
            "name": self.name,
            "found": self.found,
            "serves": self.serves,
            "hint": None if self.found else self.hint,
            "required": self.required,
        }


def inventory() -> list[Entry]:
    """Every entry, looked up now."""
    return [entry() for entry in ENTRIES]


def _python() -> Entry:
    version = platform.python_version()
    found = version if sys.version_info >= (3, 11) else None
    return Entry("Python", found, "everything", f"install Python 3.11 or newer (this is {version})", True)


def _torch() -> Entry:
    version = torch.__version__
    new_enough = tuple(int(part) for part in version.split("+")[0].split(".")[:2]) >= (2, 11)
    hint = f"pip install --upgrade 'torch>=2.11' (this is {version})"
    return Entry("torch", version if new_enough else None, "everything", hint, True)


def _compiler() -> Entry:
    names = [os.environ.get("CXX", ""), *(("cl",) if os.name == "nt" else ("g++", "clang++", "c++"))]
    path = next((found for name in names if name and (found := shutil.which(name))), None)
    hints = {
        "Linux": "sudo apt-get install g++, or your distribution's package",
        "Darwin": "xcode-select --install",
        "Windows": "winget install Microsoft.VisualStudio.2022.BuildTools",
    }
    hint = hints.get(platform.system(), "install g++ or clang++")
    return Entry("C++ compiler", path and version_of(path), "C++ kernels; torch.compile on the CPU", hint)


def _cuda() -> Entry:
    found = None
    if torch.cuda.is_available():
        found = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    built = torch.version.cuda or torch.version.hip
    hint = (
        "nvidia-smi tells whether the driver sees a GPU"
        if built
        else "this torch is built for the CPU: pytorch.org/get-started gives the command for your GPU"
    )
    return Entry("GPU", found, "CUDA kernels; check on the GPU", hint)


def _nvrtc() -> Entry:
    major = (torch.version.cuda or "13").split(".")[0]
    package = f"nvidia-cuda-nvrtc-cu{major}" if int(major) < 13 else "nvidia-cuda-nvrtc"
    return Entry(
        "NVRTC",
        _nvrtc_place(package),
        "CUDA kernels, and `opsmith compile` without a GPU",
        f"pip install {package}",
    )


def _nvrtc_place(package: str) -> str | None:
    installed = _package(package)
    if installed:
        return installed
    return ctypes.util.find_library("nvrtc")


def _of_package(name: str, package: str, serves: str, hint: str) -> Callable[[], Entry]:
    return lambda: Entry(name, _package(package), serves, hint)


ENTRIES: tuple[Callable[[], Entry], ...] = (
    _python,
    _torch,
    _of_package("rich", "rich", "the command line; check", install("cli")),
    _of_package("typer", "typer", "the command line", install("cli")),
    _compiler,
    _cuda,
    _nvrtc,
    _of_package("Triton", "triton", "Triton kernels; torch.compile on the GPU", install("triton")),
    _of_package("ONNX", "onnx", "export", "pip install onnx"),
    _of_package("ONNX Script", "onnxscript", "export", "pip install onnxscript"),
    _of_package("ONNX Runtime", "onnxruntime", "export: run what was exported", "pip install onnxruntime"),
    _of_package("pygraphviz", "pygraphviz", "draw: SVG, PNG and PDF", install("draw")),
    _of_package("scikit-learn", "scikit-learn", "tour", install("tour")),
)


def _package(name: str) -> str | None:
    """The version of an installed package; None where it is not installed, or leaves nothing to import."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        # Some builds, a system's own package for one, come without metadata.
        module = name.replace("-", "_")
        return "installed" if importlib.util.find_spec(module) is not None else None


def version_of(program: str, option: str = "--version") -> str:
    """The first line that a program says about its version, or where it is."""
    try:
        answer = subprocess.run([program, option], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return program
    said = (answer.stdout or answer.stderr).strip().splitlines()
    return next((line.strip() for line in said if re.search(r"\d+\.\d+", line)), program)
