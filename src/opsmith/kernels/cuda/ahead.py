"""Kernels in CUDA C++, built into a package for architectures of GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from opsmith import errors
from opsmith.build.manifest import BuiltFile
from opsmith.build.source_text import computed_includes, header_digests
from opsmith.core.missing_kernels import with_reason
from opsmith.kernels.common.ahead import (
    FIRST_CALL,
    Ahead,
    Built,
    LinkedKernel,
    SharedLibrary,
    shipped_headers,
)
from opsmith.kernels.common.sample_values import sample_values
from opsmith.kernels.cuda.compiler import (
    Instance,
    compile_to_ptx,
    name_expression,
    refuse_unknown_architectures,
)
from opsmith.kernels.cuda.kernel import CudaKernel
from opsmith.kernels.cuda.linked import linked_cuda
from opsmith.kernels.cuda.nvrtc import find_nvrtc
from opsmith.kernels.cuda.packaged import MAGIC, BuiltImage
from opsmith.kernels.cuda.parameters import VERSION
from opsmith.kernels.cuda.usage import needed_instances
from opsmith.kernels.runtime.ahead import RUNTIME

PTX, CUBIN = "compute_", "sm_"
"""Prefixes of targets: code for all later GPUs, and code for one architecture."""


class CudaAhead(Ahead):
    """Builds images that need no NVRTC on the machine that uses them."""

    def refuse(self, kernels: Sequence[CudaKernel], targets: Sequence[str]) -> None:
        """Refuse architectures that NVRTC does not know."""
        refuse_unknown_architectures([each for each in targets if each.startswith(CUBIN)])

    def build(self, kernel: CudaKernel, target: str, root: Path, folder: Path) -> Built:
        """Build all instances that samples need, for one architecture, into one file."""
        architecture = target.replace(PTX, CUBIN)
        instances = _instances(kernel, architecture)
        content, described = bytearray(MAGIC), {}
        headers = shipped_cuda_headers(kernel, root)
        for instance, parameters in zip(instances, kernel.candidates(instances, architecture), strict=True):
            cubin = kernel.compile(instance, architecture)
            if target.startswith(PTX):
                ptx = compile_to_ptx(kernel.source, kernel.operator.name, instance, architecture)
                cubin = replace(cubin, image=ptx)
            image = BuiltImage(cubin, parameters)
            described[name_expression(kernel.source, instance)] = image.describe(len(content))
            content += cubin.image
        file = BuiltFile(
            operator=kernel.operator.name,
            language=kernel.language,
            digest=kernel.digest(),
            abi=VERSION,
            target=target,
            headers=headers,
            instances=described,
        )
        return Built(file, bytes(content), "images")

    def linked(self, kernel: CudaKernel, targets: Sequence[str]) -> LinkedKernel | str:
        """Return the kernel with its rules as programs, if C++ can compute every part of its launches."""
        return linked_cuda(kernel, targets)

    def shared(self) -> Iterator[tuple[SharedLibrary, bool]]:
        """Yield the library between torch and all kernels; it is optional: images need no C++ compiler."""
        yield RUNTIME, False

    def origin(self, kernel: CudaKernel) -> str:
        """Return the package's targets for this machine's GPU (for any GPU without one), or `FIRST_CALL`."""
        available = torch.cuda.is_available()
        gpu = "sm_{}{}".format(*torch.cuda.get_device_capability()) if available else ""
        packaged = kernel.packaged(gpu)
        if packaged.targets:
            return f"built into the package for {', '.join(packaged.targets)}"
        try:
            find_nvrtc()
        except errors.ToolchainError as error:
            raise with_reason(error, packaged.found.reason) from None
        return FIRST_CALL


def _instances(kernel: CudaKernel, architecture: str) -> list[Instance]:
    """Return the instances that samples need, and the other instances that are considered for samples."""
    calls = partial(sample_values, kernel.operator)
    found = dict.fromkeys(needed_instances(kernel, architecture, calls))
    for dtype in kernel.dtypes:
        for values in calls(dtype):
            found |= dict.fromkeys(each for variant in kernel.variants(values) for each in variant)
    return list(found)


def shipped_cuda_headers(kernel: CudaKernel, package: Path) -> dict[str, str]:
    """Return the headers of a package that a kernel in CUDA C++ may include; see `shipped_headers`.

    NVRTC does not report which headers it reads, so their names must be written out.

    Raises:
        UsageError: Also if a macro makes the name of a header.
    """
    source = kernel.source
    computed = computed_includes(source.text, source.folder)
    if computed:
        raise kernel.error(
            errors.UsageError,
            "a macro computes the name of a header that its CUDA kernel includes",
            expected="the name of each header in an `#include`, or in the definition of a macro",
            got=f"#include {computed[0]}",
            hint='write each name out: one `#include "..."` for each case',
        )
    return shipped_headers(kernel, package, header_digests(source.text, source.folder))
