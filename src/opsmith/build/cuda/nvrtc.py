"""NVRTC, NVIDIA's compiler of CUDA C++ as a library: it needs neither a GPU nor a driver."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opsmith import errors
from opsmith.build.cuda.finding import Place, builtins_beside, no_nvrtc, nvrtc_places

COMPILATION = 6
"""The status of a source that NVRTC refuses."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What NVRTC made of a source.

    Attributes:
        image: The cubin, or the PTX; empty where the source is refused.
        names: What the functions that were asked for are called in it.
        log: What it printed.
        refused: Whether the source is refused.
    """

    image: bytes
    names: Mapping[str, str]
    log: str
    refused: bool = False


class Nvrtc:
    """A loaded NVRTC.

    Args:
        library: The library.
        place: Where it was found.

    Attributes:
        version: Of CUDA, as (13, 0).
        architectures: The compute capabilities it compiles for, as 80 for sm_80.
    """

    def __init__(self, library: Any, place: Place) -> None:
        self._library, self._place = library, place
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
    ) -> Outcome:
        """Compile a source.

        Args:
            text: The source.
            options: Options of NVRTC.
            headers: Files that it may include, by name.
            names: Expressions that name functions which must be in the result, as `scaled<float>`.
            ptx: Whether to return PTX instead of a cubin.

        Raises:
            ToolchainError: If NVRTC fails in another way than by refusing the source.
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
                return Outcome(b"", {}, log, refused=True)
            if status:
                raise self._failed("CompileProgram", status, log)
            lowered = {name: self._lowered(program, name) for name in names}
            image = self._bytes("PTX" if ptx else "CUBIN", program)
            return Outcome(image, lowered, log)
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
        said = self._library.nvrtcGetErrorString(status).decode()
        return errors.ToolchainError(
            f"NVRTC fails: nvrtc{name} returns {said}",
            expected="an NVRTC that is whole, and of one version with what lies beside it",
            got=" ".join(filter(None, [self._place.path, log.strip()])),
            hint="install it again: `pip install --force-reinstall nvidia-cuda-nvrtc`",
        )


def _strings(texts: Sequence[str]) -> Any:
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))


def find_nvrtc() -> Nvrtc:
    """The first NVRTC of this machine that loads.

    Raises:
        ToolchainError: If there is none.
    """
    return _loaded(nvrtc_places())


def nvrtc_identity() -> str:
    """What names the NVRTC that `find_nvrtc` gives: the files that there are, or else its version.

    Raises:
        ToolchainError: If there is none.
    """
    files = [place.identity for place in nvrtc_places() if place.identity != place.path]
    return "; ".join(files) or str(find_nvrtc().version)


@functools.cache
def _loaded(places: Sequence[Place]) -> Nvrtc:
    hindrances = []
    for place in places:
        try:
            for builtins in builtins_beside(place):  # which some NVRTCs look for by name alone
                ctypes.CDLL(str(builtins))
            return Nvrtc(ctypes.CDLL(place.path), place)
        except (OSError, AttributeError) as error:  # the latter where it is too old to have a function
            hindrances.append(str(error))
    raise no_nvrtc(hindrances[0] if hindrances else "none is found")
