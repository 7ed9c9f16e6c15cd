"""The corpus of CUDA kernels: right ones, wrong ones, and those that need NVIDIA's headers."""

from __future__ import annotations

from collections.abc import Sequence

import emulated_kernels
import kernels_matrices
import kernels_reductions
import kernels_reported
import kernels_rows
from emulated_kernels import KernelCase

RIGHT: Sequence[KernelCase] = [
    *emulated_kernels.RIGHT,
    *kernels_reductions.RIGHT,
    *kernels_matrices.RIGHT,
    *kernels_rows.RIGHT,
]
WRONG: Sequence[KernelCase] = [
    *emulated_kernels.WRONG,
    *kernels_reductions.WRONG,
    *kernels_matrices.WRONG,
    *kernels_rows.WRONG,
    *kernels_reported.WRONG,
]
WITH_NVIDIA: Sequence[KernelCase] = [*emulated_kernels.WITH_NVIDIA, *kernels_rows.WITH_NVIDIA]
CASES = {each.name: each for each in (*RIGHT, *WRONG, *WITH_NVIDIA)}
