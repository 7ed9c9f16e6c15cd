"""Launches of CUDA kernels without a GPU: a driver that holds callers to its contract, before an emulation.

Everything but the GPU is real: NVRTC compiles the kernel, its cubin is loaded by its name, the parameters are
laid out and handed over as the driver takes them. The emulation of the kernel then reads these parameters,
and the tensors at the addresses in them.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor

import opsmith
from opsmith import config
from opsmith.core.kernels import Kernel
from opsmith.kernels.common.dtypes import CPP_TYPES
from opsmith.kernels.cuda.compiler import Instance
from opsmith.kernels.cuda.emulation.call import fault_error
from opsmith.kernels.cuda.emulation.compiler import EmulatedLibrary, emulated_libraries
from opsmith.kernels.cuda.emulation.findings import findings_of
from opsmith.kernels.cuda.emulation.launch import (
    EmulatedLaunch,
    LaunchTensor,
    Order,
    TensorUse,
    run_launches,
)
from opsmith.kernels.cuda.kernel import CudaKernel
from opsmith.kernels.cuda.launch import Geometry
from opsmith.kernels.cuda.parameters import CudaParameter, PackedParameters
from opsmith.kernels.on_cpu import NOTE
from opsmith.kernels.runtime.driver import Driver, TorchCuda

SOURCE = Path(__file__).with_name("fake_driver.c")
ARCHITECTURE = "sm_90"
STREAM = 0x5EED


class Record(ctypes.Structure):
    """The driver's record, as in fake_driver.c."""

    _fields_ = [
        ("launches", ctypes.c_int),
        ("loads", ctypes.c_int),
        ("device", ctypes.c_int),
        ("allowed", ctypes.c_int),
        ("prefers_shared", ctypes.c_int),
        ("depth", ctypes.c_int),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("name", ctypes.c_char * 256),
    ]


def driver_file(name: str = "driver.so") -> Path:
    """The driver, built once on a machine for each text.

    Args:
        name: Name by which the system's loader knows it, once a process has loaded it.
    """
    text = SOURCE.read_bytes()
    folder = config.cache_directory() / f"fake-driver-{hashlib.sha256(text).hexdigest()[:16]}"
    path = folder / name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        scratch = folder / f"driver-{id(folder)}.so"
        flags = ["-O1", "-fPIC", "-shared", "-Wall", "-Werror", f"-Wl,-soname,{name}"]
        subprocess.run(["gcc", *flags, str(SOURCE), "-o", str(scratch)], check=True)
        scratch.rename(path)
    return path


@cache
def driver_library() -> Any:
    """The driver; one in a process, as the real one is."""
    library: Any = ctypes.CDLL(str(driver_file()))
    library.fake_record.restype = ctypes.POINTER(Record)
    return library


ON_LAUNCH: Any = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.POINTER(ctypes.c_void_p),
)
"""What the driver calls for each launch; see fake_driver.c."""
FAULT = 999
"""CUDA_ERROR_UNKNOWN."""


def geometry_of(numbers: Any) -> Geometry:
    """The geometry of a launch, from what the driver got."""
    return Geometry(tuple(numbers[:3]), tuple(numbers[3:6]), numbers[6])


def passed(parameters: Sequence[CudaParameter], addresses: Any) -> tuple[bytearray, list[int]]:
    """The bytes of a launch's parameters, from what the driver got, and the offset of each."""
    packed, offsets = bytearray(), []
    for at, parameter in enumerate(parameters):
        packed += bytes(-len(packed) % parameter.alignment)
        offsets.append(len(packed))
        packed += ctypes.string_at(addresses[at], parameter.size)
    return packed, offsets


class FakeDriver(Driver):
    """The driver, behind which kernels are emulated that it was given.

    Attributes:
        fault: Error of the emulation in the last launch, which a callback of C cannot raise.
    """

    def __init__(self) -> None:
        super().__init__(driver_library())
        self.fault: Exception | None = None
        self._kernels: list[CudaKernel] = []
        self._instances: dict[tuple[CudaKernel, Instance], tuple[EmulatedLibrary, int]] = {}
        self._on_launch = ON_LAUNCH(self._launched)  # as long as the driver may call it

    def run(self, *, dry: bool) -> None:
        """Run what is launched; if dry, launches are written down, and nothing runs."""
        driver_library().fake_on_launch(ON_LAUNCH() if dry else self._on_launch)

    def take(self, kernel: CudaKernel) -> None:
        """Take the launches of a kernel, whose calls raise the faults of its emulation."""
        failed = kernel._failed

        def raise_fault(_: CudaKernel, text: str) -> Exception:
            fault, self.fault = self.fault, None
            return fault or failed(text)

        kernel._failed = MethodType(raise_fault, kernel)  # type: ignore[method-assign]
        self._kernels.append(kernel)

    def emulate(self, kernel: CudaKernel, instances: Sequence[Instance]) -> None:
        """Compile instances of a kernel for the CPU."""
        for library in emulated_libraries(kernel.source, kernel.operator.name, instances):
            for entry, instance in enumerate(library.instances):
                self._instances[kernel, instance] = library, entry

    def _launched(self, function: int, name: bytes, numbers: Any, parameters: Any) -> int:
        """Run a launch on the CPU, with what a GPU would get."""
        try:
            kernel, instance = next(
                (kernel, instance)
                for kernel in self._kernels
                for (instance, _), loaded in kernel.functions.loaded.items()
                if loaded.handle == function
            )
            if (kernel, instance) not in self._instances:
                self.emulate(kernel, [instance])
            library, entry = self._instances[kernel, instance]
            packed, offsets = passed(library.parameters[entry], parameters)
            emulate_launch(kernel, library, entry, geometry_of(numbers), packed, offsets)
        except Exception as error:
            self.fault = error
            return FAULT
        return 0


def launch(function: int, geometry: Geometry, parameters: int = 8) -> None:
    """Launch a kernel by the driver itself, with parameters that are zeros.

    Raises:
        DriverError: If it refuses.
    """
    held = (ctypes.c_char * 1024)()
    addresses = (ctypes.c_void_p * parameters)(*[ctypes.addressof(held)] * parameters)
    grid, block, stream = geometry.grid, geometry.block, ctypes.c_void_p(STREAM)
    handle = ctypes.c_void_p(function)
    driver()._do("cuLaunchKernel", handle, *grid, *block, geometry.shared, stream, addresses, None)


def emulate_launch(
    kernel: CudaKernel,
    library: EmulatedLibrary,
    entry: int,
    geometry: Geometry,
    packed: bytearray,
    offsets: Sequence[int],
) -> None:
    """Run a launch on the CPU, with what a GPU would get; it writes into the tensors of the call."""
    found = [*tensors_at(library.parameters[entry], packed, offsets)]
    launch = EmulatedLaunch(
        library,
        entry,
        geometry,
        PackedParameters(bytes(packed), tuple(offsets), tuple(at for at, _ in found)),
        tuple(range(len(found))),
        tuple(tensor for _, tensor in found),
        Order("forward"),
    )
    ((result,),) = run_launches([(launch,)], in_process=True)
    source = kernel.source.kernel(library.instances[entry].entry)
    faults = [each for each in findings_of(source, launch, result) if each.cause != NOTE]
    if faults:
        raise fault_error(kernel, faults)


def tensors_at(
    parameters: Sequence[CudaParameter], packed: bytearray, offsets: Sequence[int]
) -> Iterator[tuple[int, LaunchTensor]]:
    """The tensors that parameters in memory name, each with the offset of its address."""
    for number, (parameter, at) in enumerate(zip(parameters, offsets, strict=True)):
        if not parameter.type.startswith("Tensor") or (parameter.optional and not packed[at]):
            continue
        several = parameter.type == "Tensor[]"
        count = struct.unpack_from("<q", packed, at)[0] if several else 1
        first = at + 8 * several + (parameter.size - parameter.view_size) * parameter.optional
        for place in range(first, first + count * parameter.view_size, parameter.view_size):
            tensor = _tensor_at(parameter, packed, place)
            yield place, LaunchTensor(TensorUse(f"parameter {number}", parameter.written, True), tensor)


def _tensor_at(parameter: CudaParameter, packed: bytearray, place: int) -> Tensor:
    """The tensor of a view: address, number of elements, number of dimensions, sizes and strides."""
    capacity = max(parameter.max_dim, 1)
    address, elements, dim, *numbers = struct.unpack_from(f"<Qqq{2 * capacity}q", packed, place)
    sizes, strides = numbers[:dim], numbers[capacity : capacity + dim]
    assert parameter.dtype is not None
    if not elements:
        return torch.empty_strided(sizes, strides, dtype=parameter.dtype)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    memory = (ctypes.c_char * (extent * parameter.dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=parameter.dtype).as_strided(sizes, strides)


@cache
def driver() -> FakeDriver:
    return FakeDriver()


def record() -> Record:
    """The driver's record since it was last cleared."""
    found: Record = driver_library().fake_record().contents
    return found


def forget(*, dry: bool = True) -> None:
    """Let the driver forget; it runs what is launched, unless it is dry."""
    driver().run(dry=dry)
    driver_library().fake_reset()


_copies: dict[CudaKernel, Counter[str]] = {}


def forget_copies(kernels: Iterable[CudaKernel]) -> None:
    """Count the copies of kernels from now on."""
    _copies.update({kernel: Counter(kernel.copied) for kernel in kernels})


def copied(kernel: CudaKernel) -> dict[str, int]:
    """The copies that a kernel has made since then."""
    return dict(Counter(kernel.copied) - _copies[kernel])


class OnCpu(TorchCuda):
    """A machine whose tensors are on the CPU, and whose driver is that one."""

    device = "cpu"

    def unavailable(self) -> str | None:
        return None

    def architecture(self, index: int) -> str:
        return ARCHITECTURE

    def is_capturing(self) -> bool:
        return False

    def driver(self) -> Driver:
        return driver()


def on_cpu(operator: opsmith.Operator[..., Any]) -> CudaKernel:
    """Let the CUDA kernel of an operator run on CPU tensors, among its kernels for the CPU."""
    kernels = operator.specification.kernels
    (kernel,) = {each.function: None for each in kernels if isinstance(each.function, CudaKernel)}
    if all(each.device != "cpu" for each in kernels if each.function is kernel):  # once, whoever asks again
        kernel.machine = OnCpu()
        driver().take(kernel)
        operator._attach_kernel(Kernel("cpu", kernel))
    return kernel


def emulate(kernels: Mapping[CudaKernel, Sequence[Instance]]) -> None:
    """Compile instances of kernels for the CPU, several at once; others are compiled when they run."""
    for kernel, needed in kernels.items():
        driver().emulate(kernel, needed)


def instances(kernel: CudaKernel, *constants: tuple[tuple[str, int], ...]) -> list[Instance]:
    """An instance for each dtype, and for each of these constants."""
    assert set(kernel.dtypes) <= set(CPP_TYPES)
    return [Instance(dtype, each) for dtype in kernel.dtypes or (None,) for each in constants or ((),)]
