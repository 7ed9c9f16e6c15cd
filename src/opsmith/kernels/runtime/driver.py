"""The CUDA driver, called through its C functions, and torch's GPUs."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from opsmith import errors
from opsmith.core.cached_property import cached_property
from opsmith.core.forked_locks import lock_of

LIBRARIES = ("libcuda.so.1", "libcuda.so")
LAUNCHING = (
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuLaunchKernel",
    "cuGetErrorName",
    "cuGetErrorString",
)
"""Functions for launches, in the order of the runtime's `Driver`."""
STREAM = "aoti_torch_get_current_cuda_stream"
"""Torch's function, after these functions. The runtime takes torch's own if a fake driver lacks it."""
MAX_DYNAMIC_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
PREFER_SHARED = 1
"""CU_FUNC_CACHE_PREFER_SHARED."""
DEFAULT_MAX_SHARED = 48 * 1024
"""Bytes of shared memory, static and dynamic, that a kernel may use without `cuFuncSetAttribute`."""

REFUSED = {200, 209, 218, 221, 222, 223}
"""Statuses for an image that a driver does not accept: INVALID_IMAGE, NO_BINARY_FOR_GPU, INVALID_PTX,
JIT_COMPILER_NOT_FOUND, UNSUPPORTED_PTX_VERSION, JIT_COMPILATION_DISABLED (`CUresult` in the manual)."""


class DriverError(Exception):
    """Failure of a function of the driver.

    Args:
        function: Name of the function.
        status: Status that it returned.
        text: The driver's text for the status.
    """

    def __init__(self, function: str, status: int, text: str) -> None:
        self.function, self.status = function, status
        super().__init__(f"{function} returns {text}")

    @property
    def refuses_image(self) -> bool:
        """True if the driver does not accept an image, for example from a newer compiler."""
        return self.status in REFUSED


class Driver:
    """Loaded driver.

    Args:
        library: The library, or a fake of it.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lock = lock_of(self, "_lock")
        self._do("cuInit", 0)

    @contextmanager
    def on_device(self, index: int) -> Iterator[int]:
        """Context manager in which torch's context of a device is current; yields the handle of the context.

        Args:
            index: Index of the device.

        Raises:
            DriverError: If the driver refuses.
        """
        context = self._context(index)
        self._do("cuCtxPushCurrent_v2", context)
        try:
            yield context.value or 0
        finally:
            self._do("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _context(self, index: int) -> ctypes.c_void_p:
        """Return the primary context of a device, which torch uses. It is retained until the process ends."""
        with self._lock:
            if index not in self._contexts:
                device, context = ctypes.c_int(), ctypes.c_void_p()
                self._do("cuDeviceGet", ctypes.byref(device), index)
                self._do("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
                self._contexts[index] = context
            return self._contexts[index]

    def load(self, image: bytes, name: str) -> int:
        """Load a cubin into the current context, and return the handle of a kernel in it.

        It stays loaded, because a launch may be pending in a stream.

        Args:
            image: The cubin.
            name: Name of the kernel.

        Raises:
            DriverError: If the driver refuses the cubin.
        """
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._do("cuModuleLoadData", ctypes.byref(module), image)
        self._do("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function.value or 0

    @property
    def version(self) -> tuple[int, int]:
        """The driver's version of CUDA, such as (12, 4).

        Raises:
            DriverError: If the driver does not report it.
        """
        number = ctypes.c_int()
        self._do("cuDriverGetVersion", ctypes.byref(number))
        return number.value // 1000, number.value % 1000 // 10

    def allow_shared(self, function: int, shared: int) -> None:
        """Set the dynamic shared memory that launches of a kernel may use, in bytes.

        Raises:
            DriverError: If the size exceeds the limit of this GPU.
        """
        self._do("cuFuncSetAttribute", ctypes.c_void_p(function), MAX_DYNAMIC_SHARED, shared)

    def prefer_shared(self, function: int) -> None:
        """Prefer shared memory to L1 cache for a kernel's launches, on GPUs where both share one memory.

        Raises:
            DriverError: If the driver refuses.
        """
        self._do("cuFuncSetCacheConfig", ctypes.c_void_p(function), PREFER_SHARED)

    @cached_property
    def opened(self) -> int:
        """The runtime's handle of the driver, which it uses for launches.

        Raises:
            ToolchainError: If the driver lacks a function, or this torch has no CUDA support.
        """
        from opsmith.kernels.runtime.library import runtime

        found = [getattr(self._library, name, None) for name in (*LAUNCHING, STREAM)]
        absent = [name for name, function in zip(LAUNCHING, found, strict=False) if function is None]
        functions = [ctypes.cast(each, ctypes.c_void_p) if each else None for each in found]
        opened: int | None = None
        if not absent:
            opened = runtime().opsmith_driver((ctypes.c_void_p * len(functions))(*functions))
        if opened is None:
            lacks = (
                f"the driver has no function `{absent[0]}`"
                if absent
                else "torch's part for CUDA is not loaded"
            )
            raise errors.ToolchainError(
                "no CUDA kernel can be launched",
                expected="a driver of CUDA 11 or later, and a torch with its part for CUDA",
                got=f"torch {torch.__version__}; {lacks}",
                hint="install a torch that is built for CUDA; until then the reference computes the operator",
            )
        return opened

    def _do(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise DriverError(name, status, self._status_text(status))

    def _status_text(self, status: int) -> str:
        """Return the name and the description of a status."""
        texts = []
        for function in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            known = getattr(self._library, function)(status, ctypes.byref(text)) == 0
            texts.append((text.value or b"").decode() if known else "")
        return ": ".join(filter(None, texts)) or f"status {status}"


@functools.cache
def find_driver() -> Driver:
    """Load the driver of this machine.

    Raises:
        ToolchainError: If there is no driver.
    """
    failure = ""
    for name in LIBRARIES:
        try:
            return Driver(ctypes.CDLL(name))
        except OSError as error:
            failure = failure or str(error)
        except DriverError as error:
            raise errors.ToolchainError(
                "the CUDA driver does not start",
                expected="a GPU that this process can see",
                got=str(error),
                hint="check the output of `nvidia-smi`, and CUDA_VISIBLE_DEVICES; until a GPU is found, the "
                "reference computes the operator",
            ) from None
    raise errors.ToolchainError(
        "there is no CUDA driver",
        expected=LIBRARIES[0],
        got=failure,
        hint="install NVIDIA's driver; until then the reference computes the operator",
    )


class TorchCuda:
    """GPUs of torch.

    Attributes:
        device: Type of the devices on which kernels run.
    """

    device = "cuda"

    def unavailable(self) -> str | None:
        """Return why CUDA kernels cannot run on torch's `cuda` devices; None if they can."""
        if torch.version.hip is not None:
            return "this torch is built for ROCm, but CUDA C++ is for NVIDIA's GPUs"
        return None

    def architecture(self, index: int) -> str:
        """Return the architecture of a GPU, such as `sm_90`."""
        major, minor = torch.cuda.get_device_capability(index)
        return f"sm_{major}{minor}"

    def is_capturing(self) -> bool:
        """Return True if torch's current stream records a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()

    def driver(self) -> Driver:
        """Return the driver.

        Raises:
            ToolchainError: If there is no driver.
        """
        return find_driver()

    def driver_version(self) -> str:
        """Return the driver's version of CUDA, such as `12.4`; empty if it is unknown."""
        with suppress(DriverError, errors.ToolchainError, AttributeError):  # a missing function
            return "{}.{}".format(*self.driver().version)
        return ""
