"""Interface with which a language compiles kernels for absent GPUs, to report their resources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from opsmith.core.guarded_part import GuardedPart, unusable
from opsmith.kernels.common.gpu_resources import ARCHITECTURES, KernelUsage
from opsmith.kernels.common.memory_access import KernelAccess
from opsmith.kernels.common.sample_values import SampleValues


class GpuUsage(GuardedPart, ABC):
    """Compiler of one language for GPUs, used by `opsmith compile`, by pages and by the property `resources`.

    Attributes:
        has_limits: True if authors may state limits of resources, which `resources` compares with kernels.
        models_access: True if the language has a memory access model.
    """

    has_limits: ClassVar[bool] = False
    models_access: ClassVar[bool] = False

    @abstractmethod
    def usage(
        self,
        kernel: Any,
        architectures: Sequence[str] = ARCHITECTURES,
        calls: SampleValues | None = None,
    ) -> Iterator[KernelUsage]:
        """Compile every instance of a kernel that samples need, and yield the resources of each instance.

        Args:
            kernel: The kernel.
            architectures: Architectures to compile for.
            calls: Function that returns argument values in a dtype; by default the values of the samples.

        Raises:
            CompileError, ToolchainError: If the compiler refuses the source, or is missing.
            MissingSamplesError: If the instances depend on samples, and there are no samples.
        """

    @abstractmethod
    def refuse_unknown(self, architectures: Sequence[str]) -> None:
        """Refuse architectures that the compiler does not know, before it compiles anything.

        Raises:
            ToolchainError: If an architecture is unknown, or the compiler is missing.
        """

    def versions(self) -> Mapping[str, str]:
        """Return the versions of the compilers, for the JSON of `opsmith compile`."""
        return {}

    def accesses(
        self, kernel: Any, calls: SampleValues, dtypes: Sequence[torch.dtype] = ()
    ) -> list[KernelAccess]:
        """Return the memory accesses of a kernel, if the language models them.

        Raises:
            NotEmulatedError: If the CPU cannot run the kernel.
            KernelFaultError: If the kernel has a fault, which makes the counts meaningless.
            MissingSamplesError: If the kernel takes none of the calls.
        """
        raise unusable(self, "models_access", "a class with a method `accesses`", True, (kernel,))
