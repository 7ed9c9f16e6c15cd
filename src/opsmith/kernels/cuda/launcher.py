"""Launcher of a CUDA kernel: instances are loaded on a GPU once, and launched on torch's stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from opsmith import errors
from opsmith.core.forked_locks import lock_of
from opsmith.core.missing_kernels import with_reason
from opsmith.kernels.cuda.compiler import Cubin, Instance, name_expression
from opsmith.kernels.cuda.driver import DEFAULT_MAX_SHARED, DriverError
from opsmith.kernels.cuda.launch import Geometry
from opsmith.kernels.cuda.limits import LaunchLimits
from opsmith.kernels.cuda.plan import CudaPlan

if TYPE_CHECKING:
    from opsmith.kernels.cuda.kernel import CudaKernel


@dataclass(slots=True)
class LoadedFunction:
    """Instance that is loaded on a GPU, with the dynamic shared memory that its launches may use."""

    handle: int
    cubin: Cubin
    limits: LaunchLimits
    shared: int = 0

    @classmethod
    def of(cls, handle: int, cubin: Cubin) -> LoadedFunction:
        """Return the function of a cubin by its handle."""
        return cls(handle, cubin, LaunchLimits.of(cubin, cubin.architecture))


class Launcher:
    """Launcher of a kernel.

    Args:
        kernel: The kernel.

    Attributes:
        functions: What is loaded, by instance and index of the GPU. It stays loaded: a launch may be
            pending.
    """

    def __init__(self, kernel: CudaKernel) -> None:
        self._kernel = kernel
        self._lock = lock_of(self, "_lock")
        self.functions: dict[tuple[Instance, int], LoadedFunction] = {}

    def launch(self, plan: CudaPlan, tensors: Sequence[Tensor], index: int) -> None:
        """Launch the kernels of a call one after the other on torch's current stream of a GPU.

        Args:
            plan: The plan of the call, with a launch at least.
            tensors: Tensors of the call.
            index: Index of the GPU.

        Raises:
            KernelError, LaunchError: If the driver refuses a launch, or the GPU cannot do it.
            CompileError, ToolchainError: If NVRTC refuses the source, or is missing.
        """
        machine = self._kernel.machine
        driver = machine.driver()
        launch = plan.launches[0]
        try:
            with driver.on_device(index):
                functions = []
                for launch in plan.launches:  # which an error names
                    functions.append(self._function(launch.instance, launch.geometry, index))
                stream = machine.stream(index)
                for launch, function in zip(plan.launches, functions, strict=True):
                    addresses = [tensors[at].data_ptr() for at in launch.tensors]
                    packed = launch.packed.with_addresses(addresses)
                    driver.launch(function.handle, launch.geometry, stream, packed, launch.packed.offsets)
        except DriverError as error:
            geometry = launch.geometry
            named = f" `{launch.instance.entry}`" if launch.instance.entry else ""
            raise self._kernel.error(
                errors.KernelError,
                f"the CUDA kernel{named} is not launched: {error}",
                got=f"grid {geometry.grid}, block {geometry.block}, {geometry.shared} bytes of shared "
                f"memory, on {machine.architecture(index)}",
                hint="see what it takes with `opsmith compile`; what a kernel before it did wrong comes up "
                "here, too: run with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer",
            ) from None

    def _function(self, instance: Instance, geometry: Geometry, index: int) -> LoadedFunction:
        """Load an instance into the current context, once for each GPU."""
        with self._lock:
            function = self.functions.get((instance, index))
            if function is None:
                if self._kernel.machine.is_capturing():
                    raise self._kernel.error(
                        errors.KernelError,
                        "the CUDA kernel cannot be loaded while a CUDA graph is captured",
                        got="the first call of " + (f"its instance {instance}" if str(instance) else "it"),
                        hint="call the operator once with such arguments before the capture",
                    )
                function = self.functions[instance, index] = self._loaded(instance, index)
            if not function.limits.allow(geometry):
                raise function.limits.refused(self._kernel, geometry)
            total = function.limits.static + geometry.shared
            if geometry.shared > function.shared and total > DEFAULT_MAX_SHARED:
                self._kernel.machine.driver().allow_shared(function.handle, geometry.shared)
                function.shared = geometry.shared
            return function

    def _loaded(self, instance: Instance, index: int) -> LoadedFunction:
        """Load an instance: built in the package of the kernel, from the cache, or compiled now.

        Raises:
            CompileError, ToolchainError: If NVRTC refuses the source, or is missing.
            DriverError: If the driver refuses what was compiled here.
        """
        kernel, machine = self._kernel, self._kernel.machine
        driver, architecture = machine.driver(), machine.architecture(index)
        packaged = kernel.packaged(architecture)
        for path, image in packaged.images(name_expression(kernel.source, instance)):
            try:
                handle = driver.load(image.cubin.image, image.cubin.name)
            except DriverError as error:  # one that is older than what built it
                packaged.drop(path, f"the driver does not load it: {error}")
                kernel.choose_anew()
                continue
            return LoadedFunction.of(handle, image.cubin)
        try:
            cubin = kernel.compile(instance, architecture)
        except errors.ToolchainError as error:
            missing = with_reason(error, packaged.found.reason)
            kernel.choose_anew(missing)
            raise missing from None
        return LoadedFunction.of(driver.load(cubin.image, cubin.name), cubin)
