"""The driver as kernels in CUDA C++ see it: all kernels that are launched on GPUs share it."""

from opsmith.kernels.runtime.driver import Driver, DriverError, TorchCuda

__all__ = ["Driver", "DriverError", "TorchCuda"]
