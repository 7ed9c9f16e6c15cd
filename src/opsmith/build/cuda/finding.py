"""Where NVRTC, the headers of CUDA and the driver are on this machine."""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from opsmith import config, errors
from opsmith.extras import install

LIBRARY = re.compile(r"libnvrtc(?:-[0-9a-f]+)?\.so[.\d]*|nvrtc64_[\d_]+\.dll")
"""Files that are NVRTC; beside it lie its built-in functions, which it loads itself."""
NEWEST, OLDEST = 13, 12
"""The versions of CUDA whose NVRTC is looked for by name alone."""


@dataclass(frozen=True, slots=True)
class Place:
    """A file that may be NVRTC, and what names that very file.

    Attributes:
        path: The file, or a name that the system knows.
        identity: Another version of it has another identity.
    """

    path: str
    identity: str


@functools.cache
def nvrtc_places() -> tuple[Place, ...]:
    """Where NVRTC may be, in the order to try: torch's own version of CUDA first, then the newest."""
    found = [path for folder in _folders("lib", "lib64", "bin") for path in _libraries(folder)]
    own = (torch.version.cuda or "").partition(".")[0]
    found.sort(key=lambda path: (str(_major(path)) != own, -_major(path)))
    named = (f"libnvrtc.so.{major}" for major in range(NEWEST, OLDEST - 1, -1))
    return (
        *(Place(str(path), _identity(path)) for path in dict.fromkeys(found)),
        *(Place(name, name) for name in named),
    )


def builtins_beside(place: Place) -> list[Path]:
    """The built-in functions that lie beside an NVRTC; nothing where the system knows where it is."""
    folder = Path(place.path).parent
    return sorted(folder.glob("libnvrtc-builtins.so*")) if folder.is_absolute() else []


@functools.cache
def include_directories() -> tuple[Path, ...]:
    """Where the headers of CUDA are, for a source that includes them; nothing where there are none."""
    for folder in _folders("include"):
        if (folder / "cuda_fp16.h").exists():
            return folder, *filter(Path.is_dir, [folder / "cccl"])
    return ()


def headers_version() -> str:
    """Which headers these are, for the key of what is built with them."""
    for folder in include_directories():
        header = folder / "cuda.h"
        if header.exists():
            found = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", header.read_text(errors="replace"))
            return f"{folder} {found[1] if found else _identity(header)}"
    return "none"


def no_nvrtc(tried: str) -> errors.ToolchainError:
    """The error where there is none."""
    return errors.ToolchainError(
        "there is no NVRTC, which compiles CUDA C++",
        expected=f"NVRTC of CUDA {OLDEST} or {NEWEST}: a package of Python, or part of a CUDA toolkit",
        got=tried,
        hint=f"{install('cuda')}; or `pip install nvidia-cuda-nvrtc`, or name a toolkit in {config.CUDA}; "
        "until then the reference computes the operator",
    )


def _folders(*names: str) -> Iterator[Path]:
    """The folders of these names in which packages of Python, torch and toolkits keep what they bring."""
    for root in dict.fromkeys(map(Path, filter(None, sys.path))):
        nvidia = root / "nvidia"
        if nvidia.is_dir():
            packages = sorted((each for each in nvidia.iterdir() if each.is_dir()), reverse=True)
            yield from (each / name for each, name in itertools.product(packages, names))
    if "lib" in names:
        yield Path(torch.__file__).parent / "lib"
    for toolkit in filter(None, [config.cuda_toolkit(), "/usr/local/cuda"]):
        yield from (Path(toolkit) / name for name in names)


def _libraries(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    inside = [*folder.iterdir(), *(folder / "x86_64").glob("*")]  # where Windows has them since CUDA 13
    return sorted(path for path in inside if LIBRARY.fullmatch(path.name))


def _major(path: Path) -> int:
    digits = re.findall(r"\d+", path.name.partition(".so")[2] or path.name.partition("_")[2])
    return int(digits[0][:2]) if digits else 0


def _identity(path: Path) -> str:
    """The file, for to load the library takes longer than to load a kernel that is built already."""
    resolved = path.resolve()
    state = resolved.stat()
    return f"{resolved} {state.st_size} {state.st_mtime_ns}"
