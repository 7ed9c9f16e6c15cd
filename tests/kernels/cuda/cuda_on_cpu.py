"""CUDA kernels where there is no GPU: a driver that holds callers to its contract, and runs them on the CPU.

Everything but the GPU is real: NVRTC compiles the kernel, its cubin is loaded by its name, the parameters are
laid out and handed over as the driver takes them. The same text, compiled by g++, then reads them.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import opsmith
from opsmith import config
from opsmith.build.source_text import includes_of
from opsmith.core.kernels import Kernel
from opsmith.kernels.cpp.codegen import CPP_TYPES
from opsmith.kernels.cuda.compiler import HEADER, Instance, name_expression
from opsmith.kernels.cuda.driver import Driver, TorchCuda
from opsmith.kernels.cuda.kernel import CudaKernel

HERE = Path(__file__).parent
ARCHITECTURE = "sm_90"
STREAM = 0x5EED
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"[^"\n]+"', re.MULTILINE)


class Record(ctypes.Structure):
    """The driver's record, as in fake_driver.c."""

    _fields_ = [
        ("launches", ctypes.c_int),
        ("loads", ctypes.c_int),
        ("device", ctypes.c_int),
        ("allowed", ctypes.c_int),
        ("depth", ctypes.c_int),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("name", ctypes.c_char * 256),
    ]


def _built(name: str, texts: list[str], command: list[str]) -> Path:
    """A library, built once on a machine for each text."""
    digest = hashlib.sha256("\0".join([*texts, *command]).encode()).hexdigest()[:16]
    folder = config.cache_directory() / f"cuda-on-cpu-{digest}"
    library = folder / f"{name}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for at, text in enumerate(texts):
            (folder / f"source{at}.{'c' if command[0] == 'gcc' else 'cpp'}").write_text(text)
        scratch = folder / f"{name}-{id(folder)}.so"
        subprocess.run(
            [*command, "source0" + (".c" if command[0] == "gcc" else ".cpp"), "-o", scratch.name],
            cwd=folder,
            check=True,
        )
        scratch.rename(library)
    return library


@cache
def driver_library() -> Any:
    """The driver; one in a process, as the real one is."""
    text = (HERE / "fake_driver.c").read_text()
    library: Any = ctypes.CDLL(
        str(_built("driver", [text], ["gcc", "-O1", "-fPIC", "-shared", "-Wall", "-Werror"]))
    )
    library.fake_record.restype = ctypes.POINTER(Record)
    return library


@cache
def driver() -> Driver:
    return Driver(driver_library())


def record() -> Record:
    """The driver's record since it was last cleared."""
    found: Record = driver_library().fake_record().contents
    return found


def forget(*, dry: bool = True) -> None:
    """Let the driver forget; it refuses a kernel that it cannot run on the CPU, unless it is dry."""
    driver_library().fake_reset(int(dry))


class OnCpu(TorchCuda):
    """A machine whose tensors are on the CPU, and whose driver is that one."""

    def unavailable(self) -> str | None:
        return None

    def architecture(self, index: int) -> str:
        return ARCHITECTURE

    def stream(self, index: int) -> int:
        return STREAM + index

    def is_capturing(self) -> bool:
        return False

    def driver(self) -> Driver:
        return driver()


def on_cpu(operator: opsmith.Operator[..., Any]) -> CudaKernel:
    """Let the CUDA kernel of an operator run on CPU tensors, among its kernels for the CPU."""
    kernels = operator.specification.kernels
    (kernel,) = {each.function: None for each in kernels if isinstance(each.function, CudaKernel)}
    if all(each.device != "cpu" for each in kernels if each.function is kernel):  # once, whoever asks again
        kernel._machine = OnCpu()
        operator._attach_kernel(Kernel("cpu", kernel))
    return kernel


def host(text: str) -> str:
    """The header for a compiler of the CPU: what is written in the GPU's own instructions, in C."""
    for gpu, cpu in (
        ('asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));', "bits = emulated_half(value);"),
        (
            'float value;\n    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));\n    return value;',
            "return emulated_float(bits);",
        ),
    ):
        assert gpu in text
        text = text.replace(gpu, cpu)
    return text.replace("extern __shared__", "extern")


def _without_includes(text: str) -> str:
    """A text whose own headers stand before it."""
    return _INCLUDE.sub("", text).replace("#pragma once", "")


def emulate(kernels: dict[CudaKernel, list[Instance]]) -> None:
    """Compile instances of kernels for the CPU, all at once, and give them to the driver."""
    pieces = [(HERE / "cuda_on_cpu.h").read_text(), host(HEADER.read_text()).replace("#pragma once", "")]
    named = {}
    for kernel, instances in kernels.items():
        source = kernel.source
        for header in reversed(includes_of(source.text, source.folder).values()):
            if _without_includes(header) not in pieces:
                pieces.append(_without_includes(header))
        text = _without_includes(source.text)
        if text not in pieces:  # several kernels may stand in one file
            pieces.append(text)
        together = str(any("__syncthreads" in each for each in pieces[2:])).lower()
        for instance in instances:
            lowered = kernel.compile(instance, ARCHITECTURE).name
            named[lowered] = f"&{name_expression(source, instance)}, {together}"
    table = ",\n".join(f'{{"{lowered}", emulate<{name}>}}' for lowered, name in named.items())
    pieces.append(
        f"static const std::unordered_map<std::string, Run> runs = {{{table}}};\n"
        'extern "C" Run emulated(const char* name) {\n'
        "  auto found = runs.find(name);\n  return found == runs.end() ? nullptr : found->second;\n}\n"
    )
    library = _built("emulation", ["\n".join(pieces)], ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-w"])
    assert driver_library().fake_emulate(str(library).encode())


def instances(kernel: CudaKernel, *constants: tuple[tuple[str, int], ...]) -> list[Instance]:
    """An instance for each dtype, and for each of these constants."""
    assert set(kernel.dtypes) <= set(CPP_TYPES)
    return [Instance(dtype, each) for dtype in kernel.dtypes or (None,) for each in constants or ((),)]
