"""`opsmith doctor`: installed and missing packages, and the capabilities of torch."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import opsmith
from opsmith import __version__, config
from opsmith.build.packaged import package_of, packaged_in
from opsmith.build.processor import best_level
from opsmith.cli.guard import FAILED, guarded, waiting
from opsmith.cli.kernel_origins import KernelOrigin, PackageOrigins, kernel_origins
from opsmith.cli.options import AsJson
from opsmith.cli.output import Output
from opsmith.extras import install
from opsmith.torch_library.calls_extension import calls_extension
from opsmith.torch_library.calls_extension import target as calls_target
from opsmith.torch_library.capabilities.capability import CapabilityStatus, capability_statuses

SCHEMA = 2
"""Version of the JSON output; it rises when a key is renamed, removed or changes its meaning."""


def doctor(
    package: Annotated[
        str | None,
        typer.Argument(
            metavar="[PACKAGE]",
            help="A package: also show where each of its kernels comes from on this machine.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show installed and missing packages, the features that need them, and how to install them.

    Of a package it also shows where each kernel comes from: built into the package, from the cache, compiled
    now, or missing, so that the reference runs.

    **Examples**

    - `opsmith doctor`

    - `opsmith doctor mypackage`

    - `opsmith doctor --json`

    Exit status: 0 opsmith works here, though packages of some features may be missing; 1 it does not.
    """
    with guarded():
        printer = Output(sys.stdout)
        with waiting("looking at this machine"), warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", category=RuntimeWarning)  # as of a damaged library
            entries, capabilities = inventory(), capability_statuses()
            origins = None if package is None else kernel_origins(package)
        warned = list(dict.fromkeys(str(each.message) for each in caught))
        works = all(entry.found for entry in entries if entry.required)
        works = works and not any(each.fatal for each in capabilities)
        if as_json:
            answer = {
                "schema": SCHEMA,
                "opsmith": __version__,
                "works": works,
                "entries": [entry.to_dict() for entry in entries],
                "capabilities": [each.to_dict() for each in capabilities],
                "kernels": None if origins is None else [asdict(each) for each in origins.kernels],
                "broken": None if origins is None else origins.broken,
                "warnings": warned,
            }
            printer.write_json(answer)
        else:
            console = printer.console()
            if origins is not None:
                _show_origins(console, origins)
            for text in warned:
                console.print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)
            if origins is not None or warned:
                console.print()
            _show(console, entries, capabilities, works=works)
        printer.close()
    raise typer.Exit(0 if works else FAILED)


def _show_origins(console: Console, origins: PackageOrigins) -> None:
    if origins.kernels:
        console.print(_kernels(origins.kernels))
    else:
        console.print(f"{origins.package}: no kernel from a source is declared, and none is built")
    for text in origins.broken:
        console.print(Text(f"not looked at: {text}", style="yellow"), soft_wrap=True)


def _show(
    console: Console, entries: list[InventoryItem], capabilities: list[CapabilityStatus], *, works: bool
) -> None:
    console.print(_table(entries))
    console.print()
    console.print(_capabilities(capabilities))
    missing = [entry for entry in entries if not entry.found]
    if not works:
        console.print(
            Text(f"\nopsmith {__version__} does not work here: fix what is marked in red.", style="bold red")
        )
    elif missing or not all(each.on for each in capabilities):
        console.print(
            f"\nopsmith {__version__} works here. "
            "What is missing, or off, is only needed for what stands beside it."
        )
    else:
        console.print(f"\nopsmith {__version__} works here, and nothing is missing.")


def _table(entries: list[InventoryItem]) -> Table:
    rows = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for heading in ("", "here", "for", "to get it"):
        rows.add_column(heading, overflow="fold")
    for entry in entries:
        style = "bold red" if entry.required else "yellow"
        status = Text(entry.found, style="green") if entry.found else Text("missing", style=style)
        rows.add_row(
            Text(entry.name), status, Text(entry.serves, style="dim"), Text("" if entry.found else entry.hint)
        )
    return rows


def _kernels(listed: list[KernelOrigin]) -> Table:
    rows = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for heading in ("kernel", "in", "comes from"):
        rows.add_column(heading, overflow="fold")
    for each in listed:
        style = "bold red" if each.missing else "green"
        words = f"the reference runs: {each.origin}" if each.missing else each.origin
        rows.add_row(Text(each.operator), each.language, Text(words, style=style))
    return rows


def _capabilities(listed: list[CapabilityStatus]) -> Table:
    """Return a table of the uses of torch's private names; docs/capabilities.md describes each."""
    rows = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for heading in ("of torch's private names", "here", "for", "instead"):
        rows.add_column(heading, overflow="fold")
    for each in listed:
        style = "bold red" if each.fatal else "yellow"
        status = Text("on", style="green") if each.on else Text(f"off: {each.why}", style=style)
        instead = "" if each.on else each.capability.instead or "nothing: opsmith cannot do without it"
        rows.add_row(
            Text(each.capability.name), status, Text(each.capability.purpose, style="dim"), Text(instead)
        )
    return rows


@dataclass(frozen=True)
class InventoryItem:
    """One package or program that opsmith uses.

    Args:
        name: Its name.
        found: Version or location; None if it is missing.
        serves: Features that need it.
        hint: Command or page by which to install it.
        required: Nothing works without it.
    """

    name: str
    found: str | None
    serves: str
    hint: str
    required: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the item in JSON's types, with a hint only if it is missing."""
        return {
            "name": self.name,
            "found": self.found,
            "serves": self.serves,
            "hint": None if self.found else self.hint,
            "required": self.required,
        }


def inventory() -> list[InventoryItem]:
    """Look up every item."""
    return [entry() for entry in ENTRIES]


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
    names = [os.environ.get("CXX", ""), *(("cl",) if os.name == "nt" else ("g++", "clang++", "c++"))]
    path = next((found for name in names if name and (found := shutil.which(name))), None)
    hints = {
        "Linux": "sudo apt-get install g++, or your distribution's package",
        "Darwin": "xcode-select --install",
        "Windows": "winget install Microsoft.VisualStudio.2022.BuildTools",
    }
    hint = hints.get(platform.system(), "install g++ or clang++")
    return InventoryItem(
        "C++ compiler", path and version_of(path), "C++ kernels; torch.compile on the CPU", hint
    )


def _built_kernels() -> InventoryItem:
    found = sorted(each.target for each in packaged_in(package_of(opsmith.__file__)) if each.operator)
    level = best_level()
    here = f"this processor has {level}" if level else "no level of this processor is known"
    return InventoryItem(
        "built kernels",
        f"for {', '.join(dict.fromkeys(found))}; {here}" if found else None,
        "kernels of opsmith's own operators without a C++ compiler",
        "install opsmith's wheel for this platform; with a C++ compiler they are built when called",
    )


def _calls() -> InventoryItem:
    extension = calls_extension()
    return InventoryItem(
        "calls in C++",
        None if extension is None else f"for {calls_target()}",
        "calls and backwards of small tensors in less time",
        f"{config.PYTHON_CALLS} leaves them unused: unset it"
        if config.calls_in_python()
        else "opsmith build --calls, which needs a C++ compiler and a minute",
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


def _nvrtc() -> InventoryItem:
    major = (torch.version.cuda or "13").split(".")[0]
    package = f"nvidia-cuda-nvrtc-cu{major}" if int(major) < 13 else "nvidia-cuda-nvrtc"
    return InventoryItem(
        "NVRTC",
        _package(package) or ctypes.util.find_library("nvrtc"),
        "CUDA kernels, and `opsmith compile` without a GPU",
        f"pip install {package}",
    )


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
    _nvrtc,
    _of_package("Triton", "triton", "Triton kernels; torch.compile on the GPU", install("triton")),
    _of_package("ONNX", "onnx", "export", "pip install onnx"),
    _of_package("ONNX Script", "onnxscript", "export", "pip install onnxscript"),
    _of_package("ONNX Runtime", "onnxruntime", "export: run what was exported", "pip install onnxruntime"),
    _of_package("pygraphviz", "pygraphviz", "draw: SVG, PNG and PDF", install("draw")),
    _of_package("Jinja2", "jinja2", "page; check: --html", install("page")),
    _of_package("matplotlib", "matplotlib", "benchmark: --plot", install("benchmark")),
    _of_package("scikit-learn", "scikit-learn", "tour", install("tour")),
)


def _package(name: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        # Some builds, as packages of a system, have no metadata.
        module = name.replace("-", "_")
        return "installed" if importlib.util.find_spec(module) is not None else None


def version_of(program: str) -> str:
    """Return the line with the version that a program prints, or else its path."""
    try:
        answer = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return program
    lines = (answer.stdout or answer.stderr).strip().splitlines()
    return next((line.strip() for line in lines if re.search(r"\d+\.\d+", line)), program)
