"""The CUDA driver for kernels in CUDA C++, which all kernels on GPUs share."""

from opsmith.kernels.runtime.driver import Driver, DriverError, TorchCuda

__all__ = ["Driver", "DriverError", "TorchCuda"]
