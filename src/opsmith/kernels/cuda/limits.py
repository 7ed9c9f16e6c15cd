"""Limits of a launch, set by the compiled kernel and the GPU: threads, registers, shared memory per block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opsmith import errors
from opsmith.core.kernels import BuiltKernel
from opsmith.kernels.common.gpu_resources import MOST_THREADS, REGISTERS, most_threads, multiprocessor_of
from opsmith.kernels.cuda.compiler import Cubin
from opsmith.kernels.cuda.launch import Geometry


@dataclass(frozen=True, slots=True)
class LaunchLimits:
    """Limits of the launches of a compiled kernel.

    Attributes:
        bounds: Maximum threads per block by `__launch_bounds__`; None without it.
        threads: Maximum threads per block, by the bounds and by registers.
        registers: Registers of a thread.
        static: Bytes of static shared memory of a block.
        shared: Maximum bytes of shared memory per block, static and dynamic; None if it is unknown.
        architecture: Architecture of the GPU, such as `sm_90`.
    """

    bounds: int | None
    threads: int
    registers: int
    static: int
    shared: int | None
    architecture: str

    @classmethod
    def of(cls, cubin: Cubin, architecture: str) -> LaunchLimits:
        """Return the limits of a cubin on a GPU of this architecture."""
        bounds, registers = cubin.max_threads, cubin.resources.registers
        threads = min(MOST_THREADS if bounds is None else bounds, most_threads(registers))
        multiprocessor = multiprocessor_of(architecture)
        shared = None if multiprocessor is None else multiprocessor.shared_of_block
        return cls(bounds, threads, registers, cubin.resources.shared, shared, architecture)

    def allow(self, geometry: Geometry) -> bool:
        """Return True if a launch is within the limits."""
        return geometry.threads <= self.threads and (
            self.shared is None or self.static + geometry.shared <= self.shared
        )

    def refused(self, kernel: BuiltKernel[Any], geometry: Geometry) -> errors.OpsmithError:
        """Return the error for a launch that exceeds the limits."""
        threads = f"{geometry.threads} threads, {' x '.join(map(str, geometry.block))}"
        if self.bounds is not None and geometry.threads > self.bounds:
            return kernel.error(
                errors.LaunchError,
                "a block has more threads than `__launch_bounds__` of the CUDA kernel allows",
                argument="block",
                expected=f"at most {self.bounds} threads",
                got=threads,
                hint="write a smaller `block=`, or a larger bound",
            )
        if geometry.threads > self.threads:
            return kernel.error(
                errors.LaunchError,
                "a block of the CUDA kernel needs more registers than a block may have",
                argument="block",
                expected=f"at most {self.threads} threads of {self.registers} registers each: a block has "
                f"{REGISTERS} registers",
                got=threads,
                hint=f"write `__launch_bounds__({geometry.threads})`: then each thread takes fewer "
                "registers; or write a smaller `block=`",
            )
        return kernel.error(
            errors.LaunchError,
            "a block of the CUDA kernel needs more shared memory than the GPU has for one block",
            argument="shared",
            expected=f"at most {self.shared} bytes on {self.architecture}, static and dynamic together",
            got=f"{self.static} bytes of static and {geometry.shared} bytes of dynamic shared memory",
            hint="let a block work on a smaller part at a time",
        )
