"""What a CUDA kernel asks of torch about the GPU that it runs on."""

from __future__ import annotations

import torch

from opsmith.build.cuda.driver import Driver, find_driver


class TorchCuda:
    """The GPUs that torch sees."""

    def hindrance(self) -> str | None:
        """Why no kernel of CUDA can run on what torch calls `cuda`; None where one can."""
        if torch.version.hip is not None:
            return "this torch is built for ROCm, and CUDA C++ is for NVIDIA's GPUs"
        return None

    def architecture(self, index: int) -> str:
        """What a GPU is, as `sm_90`."""
        major, minor = torch.cuda.get_device_capability(index)
        return f"sm_{major}{minor}"

    def stream(self, index: int) -> int:
        """The handle of the stream that torch works in now on a GPU."""
        return int(torch.cuda.current_stream(index).cuda_stream)

    def driver(self) -> Driver:
        """The driver.

        Raises:
            ToolchainError: If there is none.
        """
        return find_driver()
