"""CUDA C++ as a kernel language: the options of `op.kernel("cuda", cuda=...)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from opsmith import errors
from opsmith.core.kernels import LAUNCH_OPTIONS
from opsmith.kernels.common.dtypes import CPP_TYPES
from opsmith.kernels.cpp.source import no_template
from opsmith.kernels.languages import Declaration, Language, Part

if TYPE_CHECKING:
    from opsmith.kernels.cuda.ahead import CudaAhead
    from opsmith.kernels.cuda.emulation.on_cpu import Emulated
    from opsmith.kernels.cuda.kernel import CudaKernel
    from opsmith.kernels.cuda.source import CudaSource
    from opsmith.kernels.cuda.usage import CudaUsage


class CudaLanguage(Language):
    """CUDA C++, for NVIDIA's GPUs."""

    key, name, devices = "cuda", "CUDA C++", ("cuda",)
    options = (
        "cuda_file",
        "entry",
        *LAUNCH_OPTIONS,
        "launches",
        "initial",
        "scratch",
        "deterministic",
        "max_spills",
        "max_registers",
    )

    @property
    def on_cpu(self) -> type[Emulated]:
        """The emulation."""
        from opsmith.kernels.cuda.emulation.on_cpu import Emulated  # a declaration does not need it

        return Emulated

    @property
    def gpu_usage(self) -> CudaUsage:
        """NVRTC, and the emulation, which counts memory accesses."""
        from opsmith.kernels.cuda.usage import CudaUsage

        return CudaUsage()

    @property
    def ahead(self) -> CudaAhead:
        """Builds images."""
        from opsmith.kernels.cuda.ahead import CudaAhead

        return CudaAhead()

    def kernel(self, declaration: Declaration) -> CudaKernel:
        """Make a kernel; its source is read now, and at each `reload`."""
        from opsmith.kernels.cuda.kernel import CudaKernel  # `opsmith doctor` needs no kernel
        from opsmith.kernels.cuda.rules import kernel_rules
        from opsmith.kernels.cuda.source import cuda_source

        operator, declared, options = declaration.operator, declaration.declared, declaration.options
        hint = "write for example `grid='ceil(result.numel / 256)', block=256`"
        declaration.require_grid(hint, "launches")
        _check_several(options)
        dtypes = declaration.ordered_dtypes(CPP_TYPES)
        rules = kernel_rules(
            operator.specification, {name: options[name] for name in options if name != "entry"}
        )
        several = "launches" in options
        entries = [each.entry for each in rules.launches] if several else [options.get("entry")]

        def read() -> CudaSource:
            source = cuda_source(
                operator.name,
                cuda=declaration.source,
                cuda_file=declaration.file,
                entries=[*dict.fromkeys(entries)],
                declared=declared,
            )
            launched = [source.kernel(each.entry) for each in rules.launches]
            if dtypes is not None and not any(each.over_dtype for each in launched):
                raise no_template(source, "CUDA", "__global__ void")
            for each, launch in zip(launched, rules.launches, strict=True):
                _check_constants(each, launch.constants)
            others = tuple(each.placed(declaration.place) for each in source.others)
            return replace(source.placed(declaration.place), others=others)

        return CudaKernel(
            operator,
            read,
            dtypes,
            rules,
            strict=declaration.strict,
            copies_back=declaration.copies_back,
            deterministic=declaration.deterministic,
        )

    def parts(self) -> Iterator[Part]:
        """Yield NVRTC, for the version of CUDA that torch is built for."""
        major = (torch.version.cuda or "13").split(".")[0]
        package = f"nvidia-cuda-nvrtc-cu{major}" if int(major) < 13 else "nvidia-cuda-nvrtc"
        serves = "CUDA kernels, and `opsmith compile` without a GPU"
        yield Part("NVRTC", package, serves, f"pip install {package}", library="nvrtc")


LANGUAGE = CudaLanguage()


def _check_several(options: Mapping[str, Any]) -> None:
    """Refuse options of a single launch in addition to `launches=`."""
    named = [name for name in ("entry", *LAUNCH_OPTIONS) if name in options]
    if "launches" in options and named:
        raise errors.UsageError(
            "a CUDA kernel with `launches=` also has the options of a single launch",
            argument="launches",
            expected="these options in each `opsmith.Launch(...)`",
            got=", ".join(f"`{name}=`" for name in named),
            hint='write `opsmith.Launch("first(x, result)", grid=64, block=128)`',
        )


def _check_constants(source: CudaSource, constants: Mapping[str, Any]) -> None:
    """Compare the declared constants with the numbers of the template.

    Raises:
        LaunchError: If a constant is missing, or the template has no such number.
    """
    needed = [each.name for each in source.parameters if not each.is_type and not each.default]
    missing = [name for name in needed if name not in constants]
    unknown = [name for name in constants if name not in source.constants]
    if missing or unknown:
        listed = ", ".join(f"`{name}`" for name in source.constants)
        raise errors.LaunchError(
            "the constants of a CUDA kernel do not match the numbers of its template",
            argument="constants",
            expected=f"a dict with {listed}" if listed else "no constants: the template has no number",
            got=", ".join(f"`{name}`" for name in constants) or "none",
            where=source.where,
            hint=f"write `constants={{{missing[0]!r}: 'x.shape[0]'}}`"
            if missing
            else f"leave `{unknown[0]}` out, or write `template <class T, int {unknown[0]}>`",
        )
