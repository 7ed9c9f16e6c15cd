"""Triton as a kernel language: the options of `op.kernel("cuda", triton=...)`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from opsmith.extras import install
from opsmith.kernels.languages import Declaration, Language, Part

if TYPE_CHECKING:
    from opsmith.kernels.triton.kernel import TritonKernel
    from opsmith.kernels.triton.on_cpu import Interpreted
    from opsmith.kernels.triton.usage import TritonUsage


class TritonLanguage(Language):
    """Triton, for GPUs; `check` interprets its kernels on the CPU."""

    key, name, devices = "triton", "Triton", ("cuda",)
    options = ("grid", "constants", "layouts", "deterministic")

    @property
    def on_cpu(self) -> type[Interpreted]:
        """Triton's interpreter."""
        from opsmith.kernels.triton.on_cpu import Interpreted  # a declaration does not need it

        return Interpreted

    @property
    def gpu_usage(self) -> TritonUsage:
        """Triton's compiler."""
        from opsmith.kernels.triton.usage import TritonUsage

        return TritonUsage()

    def kernel(self, declaration: Declaration) -> TritonKernel:
        """Make a kernel from a function, which Triton compiles when it is first launched."""
        from opsmith.kernels.triton.kernel import DTYPES, TritonKernel  # `check` needs no kernel
        from opsmith.kernels.triton.source import POINTED, triton_source

        options = declaration.options
        hint = "write `grid=lambda result, BLOCK: (triton.cdiv(result.numel(), BLOCK),)`"
        declaration.require_grid(hint)
        dtypes = declaration.ordered_dtypes(POINTED)
        return TritonKernel(
            declaration.operator,
            triton_source(declaration.source),
            grid=options["grid"],
            constants=options.get("constants") or {},
            layouts=options.get("layouts") or {},
            dtypes=frozenset(DTYPES if dtypes is None else dtypes),
            strict=declaration.strict,
            copies_back=declaration.copies_back,
            deterministic=declaration.deterministic,
        )

    def parts(self) -> Iterator[Part]:
        """Yield Triton."""
        yield Part("Triton", "triton", "Triton kernels; torch.compile on the GPU", install("triton"))


LANGUAGE = TritonLanguage()
