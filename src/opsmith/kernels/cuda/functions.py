"""Functions of a CUDA kernel on GPUs: each instance is loaded once, and plans launch it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from opsmith import errors
from opsmith.core.call_arguments import tensors_in
from opsmith.core.forked_locks import lock_of
from opsmith.core.missing_kernels import with_reason
from opsmith.kernels.cuda.compiler import Cubin, Instance, name_expression
from opsmith.kernels.cuda.launch import Geometry
from opsmith.kernels.cuda.limits import LaunchLimits
from opsmith.kernels.cuda.nvrtc import find_nvrtc, older_nvrtcs
from opsmith.kernels.cuda.plan import CudaPlan, PlannedLaunch
from opsmith.kernels.cuda.recipe import launch_recipe
from opsmith.kernels.runtime.driver import DEFAULT_MAX_SHARED, Driver, DriverError
from opsmith.kernels.runtime.plan import Launch, Launches, Plan, copies_in

if TYPE_CHECKING:
    from opsmith.kernels.cuda.kernel import CudaKernel


@dataclass(slots=True)
class LoadedFunction:
    """Loaded instance on a GPU, with the dynamic shared memory that its launches may use."""

    handle: int
    cubin: Cubin
    limits: LaunchLimits
    shared: int = 0

    @classmethod
    def of(cls, handle: int, cubin: Cubin) -> LoadedFunction:
        """Return the function of a cubin by its handle."""
        return cls(handle, cubin, LaunchLimits.of(cubin, cubin.architecture))


def _taken(driver: Driver, cubin: Cubin) -> LoadedFunction | DriverError:
    """Load a cubin into the current context, or return the error if the driver does not accept the cubin.

    Raises:
        DriverError: If the driver fails for a different reason, such as a lack of memory.
    """
    try:
        return LoadedFunction.of(driver.load(cubin.image, cubin.name), cubin)
    except DriverError as error:
        if error.refuses_image:
            return error
        raise


class GpuFunctions:
    """Functions of a kernel that are loaded on GPUs.

    Args:
        kernel: The kernel.

    Attributes:
        loaded: Loaded functions, by instance and index of the GPU. They stay loaded: a launch may be pending.
    """

    def __init__(self, kernel: CudaKernel) -> None:
        self._kernel = kernel
        self._lock = lock_of(self, "_lock")
        self.loaded: dict[tuple[Instance, int], LoadedFunction] = {}

    def plan(self, call: CudaPlan, values: Sequence[Any]) -> Plan:
        """Plan the calls that have the signature of these values, with all functions loaded.

        Args:
            call: Plan of the call without handles.
            values: Argument values.

        Raises:
            KernelError, LaunchError: If the driver refuses a function, or the GPU cannot do a launch.
            CompileError, ToolchainError: If NVRTC refuses the source, or is missing.
        """
        device = tensors_in(list(values))[0].device
        results = []
        for each in call.results:
            strides = each.strides
            results.append((each.layout, None if strides == each.layout.stride else strides))
        buffers = (*call.results, *call.scratch)
        driver, context, launches = self._launches(call, device.index or 0) if call.launches else (0, 0, ())
        work = Launches(
            driver,
            context,
            tuple((each.layout, each.strides) for each in call.scratch),
            tuple((at, each.initial) for at, each in enumerate(buffers) if each.initial is not None),
            launches,
        )
        recipe = launch_recipe(self._kernel, call, values, self._most(call, device))
        return Plan(work, copies_in(values, dict(call.copied)), tuple(results), device, recipe)

    def _most(self, call: CudaPlan, device: torch.device) -> list[tuple[int, int]]:
        """Return the maximum threads, and bytes of dynamic shared memory, that each launch may use now."""
        most = []
        for each in call.launches:
            function = self.loaded[each.instance, device.index or 0]
            allowed = min(DEFAULT_MAX_SHARED, function.limits.shared or 0) - function.limits.static
            most.append((function.limits.threads, max(function.shared, allowed, 0)))
        return most

    def _launches(self, call: CudaPlan, index: int) -> tuple[int, int, tuple[Launch, ...]]:
        """Return the driver, torch's context of a GPU, and the launches of a call."""
        machine = self._kernel.machine
        driver = machine.driver()
        launches = []
        planned = call.launches[0]
        try:
            with driver.on_device(index) as context:
                for planned in call.launches:  # the error below names `planned`
                    function = self._function(planned.instance, planned.geometry, index)
                    launches.append(self._launch(planned, function, index))
        except DriverError as error:
            failed, geometry = self._words(planned, index)
            raise self._kernel.refused(f"{failed}: {error}", geometry) from None
        return driver.opened, context, tuple(launches)

    def _launch(self, planned: PlannedLaunch, function: LoadedFunction, index: int) -> Launch:
        geometry, packed = planned.geometry, planned.packed
        rooms = (max(view.max_dim, 1) for view in planned.views)
        return Launch(
            function.handle,
            geometry.grid,
            geometry.block,
            geometry.shared,
            packed.image,
            packed.offsets,
            tuple(zip(packed.addresses, planned.tensors, rooms, strict=True)),
            planned.numbers,
            self._words(planned, index)[0],
            self._kernel.machine.architecture(index),
        )

    def _words(self, planned: PlannedLaunch, index: int) -> tuple[str, str]:
        """Return texts for a launch's error: the kernel that did not launch, and the requested launch."""
        geometry, entry = planned.geometry, planned.instance.entry
        named = f" `{entry}`" if entry else ""
        return (
            f"the CUDA kernel{named} is not launched",
            f"grid {geometry.grid}, block {geometry.block}, {geometry.shared} bytes of shared memory, on "
            f"{self._kernel.machine.architecture(index)}",
        )

    def _function(self, instance: Instance, geometry: Geometry, index: int) -> LoadedFunction:
        """Load an instance into the current context, once for each GPU."""
        with self._lock:
            function = self.loaded.get((instance, index))
            if function is None:
                if self._kernel.machine.is_capturing():
                    raise self._kernel.error(
                        errors.KernelError,
                        "the CUDA kernel cannot be loaded while a CUDA graph is captured",
                        got="the first call of "
                        + (f"its instance {instance}" if str(instance) else "the kernel"),
                        hint="call the operator once with arguments of this kind before the capture",
                    )
                function = self.loaded[instance, index] = self._loaded(instance, index)
            if not function.limits.allow(geometry):
                raise function.limits.refused(self._kernel, geometry)
            total = function.limits.static + geometry.shared
            if geometry.shared > function.shared and total > DEFAULT_MAX_SHARED:
                self._kernel.machine.driver().allow_shared(function.handle, geometry.shared)
                function.shared = geometry.shared
            return function

    def _loaded(self, instance: Instance, index: int) -> LoadedFunction:
        """Load an instance from the kernel's package or from the cache, or compile it now.

        Raises:
            CompileError, ToolchainError: If NVRTC refuses the source, or is missing.
            DriverError: If the driver fails for a reason other than the image.
        """
        kernel, machine = self._kernel, self._kernel.machine
        driver, architecture = machine.driver(), machine.architecture(index)
        packaged = kernel.packaged(architecture)
        for path, image in packaged.images(name_expression(kernel.source, instance)):
            found = _taken(driver, image.cubin)
            if isinstance(found, LoadedFunction):
                return found
            packaged.drop(path, f"the driver does not load this file: {found}")  # too old a driver
            kernel.choose_anew()
        try:
            return self._compiled_and_loaded(instance, index)
        except errors.ToolchainError as error:
            missing = with_reason(error, packaged.found.reason)
            kernel.choose_anew(missing)
            raise missing from None

    def _compiled_and_loaded(self, instance: Instance, index: int) -> LoadedFunction:
        """Compile an instance and load it; if the driver does not accept its image, try older NVRTC versions.

        Raises:
            ToolchainError: Also if the driver accepts the image of no NVRTC.
        """
        kernel, machine = self._kernel, self._kernel.machine
        driver, architecture = machine.driver(), machine.architecture(index)
        found = _taken(driver, kernel.compile(instance, architecture))
        if isinstance(found, LoadedFunction):
            return found
        newest = find_nvrtc().version
        for nvrtc in older_nvrtcs(newest):
            with suppress(errors.CompileError, errors.ToolchainError):
                other = _taken(driver, kernel.compile(instance, architecture, nvrtc))
                if isinstance(other, LoadedFunction):
                    return other
        own, version = machine.driver_version(), ".".join(map(str, newest))
        named = f" `{instance.entry}`" if instance.entry else ""
        major = own.partition(".")[0] if own else str(newest[0] - 1)
        raise errors.ToolchainError(
            f"the driver does not accept the CUDA kernel{named} that NVRTC compiled: {found}",
            operator=kernel.operator.name,
            expected=f"a driver of CUDA {version} or later, or an NVRTC that is not newer than the driver",
            got=f"NVRTC of CUDA {version}, and a driver of CUDA {own or 'unknown'}, for {architecture}",
            hint=f"install a newer driver of NVIDIA, or `pip install nvidia-cuda-nvrtc-cu{major}`; if the "
            "driver is not older than NVRTC, run `opsmith cache --clear`; until then the reference computes "
            "the operator",
        )
