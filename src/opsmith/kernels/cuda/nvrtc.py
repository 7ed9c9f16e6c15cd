"""NVRTC, the library that compiles CUDA C++: search for it and for CUDA's headers, and call its functions."""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from opsmith import config, errors
from opsmith.build.toolchain import file_identity
from opsmith.extras import install

LIBRARY = re.compile(r"libnvrtc(?:-[0-9a-f]+)?\.so[.\d]*|nvrtc64_[\d_]+\.dll")
"""File names of NVRTC. It loads its built-in functions from files in the same folder."""
FIRST_WITHOUT_SUFFIX = 13
"""First version of CUDA whose Python packages have no version in their names."""
NEWEST, OLDEST = 13, 12
"""Newest and oldest version of CUDA whose NVRTC is searched by its bare name."""
CCCL = "cuda/std/limits"
"""Header of CCCL, NVIDIA's standard library of C++, which is in a separate package."""
CRT = "crt/host_defines.h"
"""Header that CUDA's headers of types include in code for the CPU."""
COMPILATION = 6
"""The status of a source that NVRTC refuses."""


@dataclass(frozen=True, slots=True)
class NvrtcFile:
    """File that may be NVRTC.

    Attributes:
        path: Path of the file, or a name for the system's loader.
        identity: Text that differs between versions of the file.
    """

    path: str
    identity: str


@functools.cache
def nvrtc_files() -> tuple[NvrtcFile, ...]:
    """Return candidates for NVRTC, in the order to try: torch's version of CUDA, then from new to old."""
    found = [path for folder in _folders("lib", "lib64", "bin") for path in _libraries(folder)]
    own = (torch.version.cuda or "").partition(".")[0]
    found.sort(key=lambda path: (str(_major(path)) != own, -_major(path)))
    named = (f"libnvrtc.so.{major}" for major in range(NEWEST, OLDEST - 1, -1))
    return (
        *(NvrtcFile(str(path), file_identity(path)) for path in dict.fromkeys(found)),
        *(NvrtcFile(name, name) for name in named),
    )


def builtins_beside(file: NvrtcFile) -> list[Path]:
    """Return the files of built-in functions in the folder of an NVRTC; empty for a bare name."""
    folder = Path(file.path).parent
    return sorted(folder.glob("libnvrtc-builtins.so*")) if folder.is_absolute() else []


@functools.cache
def include_directories() -> tuple[Path, ...]:
    """Return the folders of CUDA's headers, including CCCL; empty if they are not installed."""
    folders = [each for each in _folders("include") if each.is_dir()]
    with_types = [each for each in folders if (each / "cuda_fp16.h").is_file()]
    if not with_types:
        return ()
    own = with_types[0]
    # For CUDA 13, headers that a CPU compiler needs are in a separate Python package, which is often missing.
    alike = (each for each in folders if _cuda_version(each) in (None, _cuda_version(own)))
    crt = [each for each in (own, *alike) if (each / CRT).is_file()][:1]
    beside = (each for folder in (own, *folders) for each in (folder / "cccl", folder))
    cccl = [each for each in beside if (each / CCCL).is_file()][:1]
    return tuple(dict.fromkeys([own, *crt, *cccl]))


def has_cccl() -> bool:
    """Return True if CCCL is installed."""
    return any((folder / CCCL).is_file() for folder in include_directories())


def cccl_package() -> str:
    """Return the Python package with CCCL for NVRTC's version of CUDA (without NVRTC, for the newest)."""
    try:
        major, _ = find_nvrtc().version
    except errors.ToolchainError:
        major = NEWEST
    return "nvidia-cuda-cccl" if major >= FIRST_WITHOUT_SUFFIX else f"nvidia-cuda-cccl-cu{major}"


@functools.cache
def headers_version() -> str:
    """Return the versions of CUDA's headers, for cache keys."""
    versions = []
    for folder in include_directories():
        header = folder / "cuda.h"
        if header.exists():
            versions.append(f"{folder} {_cuda_version(folder) or file_identity(header)}")
        if (folder / CRT).is_file():
            versions.append(file_identity(folder / CRT))
        if (folder / CCCL).is_file():
            versions.append(file_identity(folder / CCCL))
    return "; ".join(versions) or "none"


def _cuda_version(folder: Path) -> str | None:
    """The CUDA version of a folder of headers, such as 13000; None if no `cuda.h` in it states a version."""
    header = folder / "cuda.h"
    text = header.read_text(errors="replace") if header.is_file() else ""
    found = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", text)
    return found[1] if found else None


def no_nvrtc(tried: str) -> errors.ToolchainError:
    """Return the error for a missing NVRTC."""
    return errors.ToolchainError(
        "there is no NVRTC, which compiles CUDA C++",
        expected=f"NVRTC of CUDA {OLDEST} or {NEWEST}: a package of Python, or part of a CUDA toolkit",
        got=tried,
        hint=f"{install('cuda')}; or `pip install nvidia-cuda-nvrtc`, or name a toolkit in {config.CUDA}; "
        "until then the reference computes the operator",
    )


def _folders(*names: str) -> Iterator[Path]:
    """Yield the folders with these names in NVIDIA's Python packages, torch and CUDA toolkits."""
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
    inside = [*folder.iterdir(), *(folder / "x86_64").glob("*")]  # the folder on Windows since CUDA 13
    return sorted(path for path in inside if LIBRARY.fullmatch(path.name))


def _major(path: Path) -> int:
    digits = re.findall(r"\d+", path.name.partition(".so")[2] or path.name.partition("_")[2])
    return int(digits[0][:2]) if digits else 0


@dataclass(frozen=True, slots=True)
class NvrtcResult:
    """Result of a compilation.

    Attributes:
        image: Cubin or PTX; empty if the source is refused.
        names: Lowered names of the requested functions.
        log: Output of the compiler.
        refused: True if the source is refused.
    """

    image: bytes
    names: Mapping[str, str]
    log: str
    refused: bool = False


class Nvrtc:
    """Loaded NVRTC.

    Args:
        library: The library.
        file: File of the library.

    Attributes:
        file: The file.
        version: Version of CUDA, such as (13, 0).
        architectures: Compute capabilities for which it compiles, such as 80 for sm_80.
    """

    def __init__(self, library: Any, file: NvrtcFile) -> None:
        self._library, self.file = library, file
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._do("Version", ctypes.byref(major), ctypes.byref(minor))
        self.version = major.value, minor.value
        count = ctypes.c_int()
        self._do("GetNumSupportedArchs", ctypes.byref(count))
        listed = (ctypes.c_int * count.value)()
        self._do("GetSupportedArchs", listed)
        self.architectures = tuple(sorted(listed))

    def compile(
        self,
        text: str,
        *,
        options: Sequence[str],
        headers: Mapping[str, str] | None = None,
        names: Sequence[str] = (),
        ptx: bool = False,
    ) -> NvrtcResult:
        """Compile a source.

        Args:
            text: Text of the source.
            options: Options of NVRTC.
            headers: Text of headers that it may include, by name.
            names: Name expressions of functions to instantiate, such as `scaled<float>`.
            ptx: True to return PTX instead of a cubin.

        Raises:
            ToolchainError: If NVRTC fails for a reason other than the source.
        """
        headers = headers or {}
        program = ctypes.c_void_p()
        handle = ctypes.byref(program)
        texts, titles = (_strings([*each]) for each in (headers.values(), headers))
        self._do("CreateProgram", handle, text.encode(), b"kernel.cu", len(headers), texts, titles)
        try:
            for name in names:
                self._do("AddNameExpression", program, name.encode())
            status = self._library.nvrtcCompileProgram(program, len(options), _strings(options))
            log = self._bytes("ProgramLog", program).decode(errors="replace").rstrip("\0")
            if status == COMPILATION:
                return NvrtcResult(b"", {}, log, refused=True)
            if status:
                raise self._failed("CompileProgram", status, log)
            lowered = {name: self._lowered(program, name) for name in names}
            image = self._bytes("PTX" if ptx else "CUBIN", program)
            return NvrtcResult(image, lowered, log)
        finally:
            self._do("DestroyProgram", handle)

    def _lowered(self, program: ctypes.c_void_p, name: str) -> str:
        found = ctypes.c_char_p()
        self._do("GetLoweredName", program, name.encode(), ctypes.byref(found))
        return (found.value or b"").decode()

    def _bytes(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._do(f"Get{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._do(f"Get{what}", program, buffer)
        return buffer.raw[: size.value]

    def _do(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, f"nvrtc{name}")(*arguments)
        if status:
            raise self._failed(name, status)

    def _failed(self, name: str, status: int, log: str = "") -> errors.ToolchainError:
        text = self._library.nvrtcGetErrorString(status).decode()
        return errors.ToolchainError(
            f"NVRTC fails: nvrtc{name} returns {text}",
            expected="a complete NVRTC, of the same version as the files in its folder",
            got=" ".join(filter(None, [self.file.path, log.strip()])),
            hint="install NVRTC again: `pip install --force-reinstall nvidia-cuda-nvrtc`",
        )


def _strings(texts: Sequence[str]) -> Any:
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))


def find_nvrtc() -> Nvrtc:
    """Load NVRTC: the first file of this machine that can be loaded.

    Raises:
        ToolchainError: If there is none.
    """
    return _loaded(nvrtc_files())


def older_nvrtcs(version: tuple[int, int]) -> Iterator[Nvrtc]:
    """Yield the versions of NVRTC that are older than `find_nvrtc()`, in the order to try."""
    for file in nvrtc_files():
        with suppress(errors.ToolchainError):
            found = _loaded((file,))
            if found.version < version:
                yield found


def nvrtc_identity() -> str:
    """Return text that differs between versions of `find_nvrtc()`: its files, or else its version.

    Raises:
        ToolchainError: If there is none.
    """
    files = [file.identity for file in nvrtc_files() if file.identity != file.path]
    return "; ".join(files) or str(find_nvrtc().version)


@functools.cache
def _loaded(files: Sequence[NvrtcFile]) -> Nvrtc:
    failures = []
    for file in files:
        try:
            for builtins in builtins_beside(file):  # some versions of NVRTC search them by their bare names
                ctypes.CDLL(str(builtins))
            return Nvrtc(ctypes.CDLL(file.path), file)
        except (OSError, AttributeError) as error:  # AttributeError if it is too old
            failures.append(str(error))
    raise no_nvrtc(failures[0] if failures else "none is found")
