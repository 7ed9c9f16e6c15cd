"""Launches of Triton kernels without a GPU: by plans through a driver that stands in, or by Triton."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
from fake_driver import ON_LAUNCH, OnCpu, driver, driver_library, forget
from triton.backends.compiler import GPUTarget

from opsmith.core.kernels import Kernel
from opsmith.kernels.common.cubin import parameter_places
from opsmith.kernels.triton.kernel import TritonKernel

MOST_SHARED = 232_448
"""Bytes of shared memory of a block, as Triton hears of them."""


class Launched(NamedTuple):
    """A launch as the driver gets it."""

    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    parameters: list[bytes]


class Launches(NamedTuple):
    """Launches of a test.

    Attributes:
        by_plan: Those that come to the driver.
        by_triton: Those that come to Triton's launcher: the grid, and the values of the parameters.
        images: Number of images that are loaded for plans.
    """

    by_plan: list[Launched]
    by_triton: list[tuple[tuple[int, ...], tuple[Any, ...]]]
    images: list[str]


_by_triton: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []
"""One list for all tests: what Triton has compiled keeps its launcher."""


_on_cpu: list[tuple[Any, tuple[Kernel, ...], TritonKernel, Any]] = []
"""Operators whose kernels take CPU tensors now, with what each had before."""


def launcher(_source: Any, _metadata: Any) -> Any:
    """The stand-in for Triton's launcher, which gets what a plan is not for."""

    def launch(*given: Any) -> None:  # grid, stream, function, metadata twice, two hooks, the arguments
        _by_triton.append((given[:3], given[9:]))

    return launch


def triton_driver() -> SimpleNamespace:
    """The stand-in for Triton's driver."""
    return SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        launcher_cls=launcher,
        utils=SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": MOST_SHARED},
            load_binary=lambda *given: (1, 1, 32, 0, 1024),
        ),
    )


@contextlib.contextmanager
def recording() -> Iterator[Launches]:
    """Context in which launches are written down, and compute nothing."""
    forget()
    _by_triton.clear()
    found, places = Launches([], _by_triton, []), {}
    stand_in, load = triton_driver(), driver().load

    def noted(image: bytes, name: str) -> int:
        handle = load(image, name)
        places[handle] = parameter_places(image, name)
        found.images.append(name)
        return handle

    @ON_LAUNCH
    def on_launch(function: int, name: bytes, numbers: Any, parameters: Any) -> int:
        sizes = [size for _, size in places[function]]
        content = [ctypes.string_at(parameters[at], size) for at, size in enumerate(sizes)]
        grid, block = tuple(numbers[:3]), tuple(numbers[3:6])
        found.by_plan.append(Launched(name.decode(), grid, block, numbers[6], content))
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(triton.runtime.driver), "active", property(lambda self: stand_in))
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        patch.setattr(
            type(driver()), "load", lambda self, image, name: noted(image, name)
        )  # an instance would keep it
        driver_library().fake_on_launch(on_launch)
        yield found
    while _on_cpu:
        operator, kernels, kernel, machine = _on_cpu.pop()
        kernel.machine = machine
        kernel.reload()
        operator._replace(kernels=kernels)
    forget()


def on_cpu(operator: Any) -> TritonKernel:
    """Let the Triton kernel of an operator take CPU tensors until `recording` ends, and forget all calls."""
    kernels = operator.specification.kernels
    (kernel,) = {each.given for each in kernels if isinstance(each.given, TritonKernel)}
    if all(each.device != "cpu" for each in kernels):
        _on_cpu.append((operator, kernels, kernel, kernel.machine))
        kernel.machine = OnCpu()
        operator._attach_kernel(Kernel("cpu", kernel))
    kernel.reload()
    operator.forget_calls()
    return kernel
