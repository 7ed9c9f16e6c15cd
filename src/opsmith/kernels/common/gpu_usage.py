"""Kernels compiled for GPUs that need not be there: what a language gives, for their resources."""

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
    """Compiler of one language, for `opsmith compile`, for pages and for the property `resources`.

    Attributes:
        has_limits: True if authors may state limits of resources: `resources` compares kernels with them.
        models_access: True if it has an access model.
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
        """Compile every instance of a kernel that samples need, and yield the resources that it uses.

        Args:
            kernel: The kernel.
            architectures: Architectures to compile for.
            calls: Returns argument values in a dtype; by default those of the operator's samples.

        Raises:
            CompileError, ToolchainError: If the compiler refuses the source, or is missing.
            MissingSamplesError: If the instances depend on samples, and there is none.
        """

    @abstractmethod
    def refuse_unknown(self, architectures: Sequence[str]) -> None:
        """Refuse architectures that the compiler does not know, before it compiles anything.

        Raises:
            ToolchainError: If there is one, or the compiler is missing.
        """

    def versions(self) -> Mapping[str, str]:
        """Return versions of compilers, for the JSON of `opsmith compile`."""
        return {}

    def accesses(
        self, kernel: Any, calls: SampleValues, dtypes: Sequence[torch.dtype] = ()
    ) -> list[KernelAccess]:
        """Return the accesses of a kernel to memory, where the language models them.

        Raises:
            NotEmulatedError: If the CPU cannot run the kernel.
            KernelFaultError: If it does what it must not: then the counts say nothing.
            MissingSamplesError: If it takes none of the calls.
        """
        raise unusable(self, "models_access", "a method `accesses` beside it", True, (kernel,))
