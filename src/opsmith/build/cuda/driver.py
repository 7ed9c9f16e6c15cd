"""The CUDA driver, through its C functions: a cubin loaded, and a kernel of it launched."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from opsmith import errors

LIBRARIES = ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1", "libcuda.so")
MAX_DYNAMIC_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
WITHOUT_ASKING = 48 * 1024
"""So much shared memory a kernel may have that does not ask for more."""


class DriverError(Exception):
    """A function of the driver did not do what it was asked.

    Args:
        function: Its name.
        status: What it returned.
        said: What the driver says about that.
    """

    def __init__(self, function: str, status: int, said: str) -> None:
        self.function, self.status = function, status
        super().__init__(f"{function} returns {said}")


class Driver:
    """A loaded driver.

    Args:
        library: The library, or what stands in for it.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.Lock()
        library.cuLaunchKernel.argtypes = [
            ctypes.c_void_p,
            *[ctypes.c_uint] * 7,
            ctypes.c_void_p,
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.c_void_p,
        ]
        self._do("cuInit", 0)

    @contextmanager
    def on_device(self, index: int) -> Iterator[None]:
        """A region in which the context that torch uses on a device is this thread's.

        Args:
            index: Number of the device.

        Raises:
            DriverError: If the driver does not give it.
        """
        context = self._context(index)
        self._do("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._do("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _context(self, index: int) -> ctypes.c_void_p:
        """The primary context of a device, which is torch's own; kept as long as the process lasts."""
        with self._lock:
            if index not in self._contexts:
                device, context = ctypes.c_int(), ctypes.c_void_p()
                self._do("cuDeviceGet", ctypes.byref(device), index)
                self._do("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
                self._contexts[index] = context
            return self._contexts[index]

    def load(self, image: bytes, name: str, *, shared: int = 0) -> int:
        """Load a cubin into the current context, and return the handle of a kernel in it.

        It stays loaded: a launch of it may wait in some stream.

        Args:
            image: The cubin.
            name: Name of the kernel.
            shared: Bytes of dynamic shared memory that its launches may have.

        Raises:
            DriverError: If the driver refuses it.
        """
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._do("cuModuleLoadData", ctypes.byref(module), image)
        self._do("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        self.allow_shared(function.value or 0, shared)
        return function.value or 0

    def allow_shared(self, function: int, shared: int) -> None:
        """Let launches of a kernel have so many bytes of dynamic shared memory.

        Raises:
            DriverError: If a block of this GPU cannot have so many.
        """
        if shared > WITHOUT_ASKING:
            self._do("cuFuncSetAttribute", ctypes.c_void_p(function), MAX_DYNAMIC_SHARED, shared)

    def launch(
        self,
        function: int,
        grid: Sequence[int],
        block: Sequence[int],
        shared: int,
        stream: int,
        packed: bytearray,
        offsets: Sequence[int],
    ) -> None:
        """Launch a kernel in the current context; it runs when its stream comes to it.

        Args:
            function: Its handle.
            grid: How many blocks, in three directions.
            block: How many threads a block has, in three directions.
            shared: Bytes of dynamic shared memory.
            stream: Handle of the stream.
            packed: The parameters, one after the other; the driver copies them before it returns.
            offsets: Where each parameter begins.

        Raises:
            DriverError: If the driver refuses the launch.
        """
        held = (ctypes.c_char * len(packed)).from_buffer(packed)
        base = ctypes.addressof(held)
        parameters = (ctypes.c_void_p * max(len(offsets), 1))(*(base + offset for offset in offsets))
        self._do("cuLaunchKernel", function, *grid, *block, shared, stream, parameters, None)

    def _do(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise DriverError(name, status, self._said(status))

    def _said(self, status: int) -> str:
        """The name of a status, and what it means."""
        texts = []
        for function in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            known = getattr(self._library, function)(status, ctypes.byref(text)) == 0
            texts.append((text.value or b"").decode() if known else "")
        return ": ".join(filter(None, texts)) or f"status {status}"


@functools.cache
def find_driver() -> Driver:
    """The driver of this machine.

    Raises:
        ToolchainError: If there is none.
    """
    hindrance = ""
    for name in LIBRARIES:
        try:
            return Driver(ctypes.CDLL(name))
        except OSError as error:
            hindrance = hindrance or str(error)
    raise errors.ToolchainError(
        "there is no CUDA driver",
        expected=LIBRARIES[0],
        got=hindrance,
        hint="install NVIDIA's driver; until then the reference computes the operator",
    )
