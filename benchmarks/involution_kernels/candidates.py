"""Kernels in C++ that are to come with `opsmith.ops.involution`, beside operators of the same references.

They are right, and faster than the reference; how far they are from what the processor can do is what
`benchmarks/involution.py` prints. Until that is enough they are no part of the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import opsmith
from opsmith.ops import involution as bundled
from opsmith.ops.involution import involution_input_gradient as bundled_input_gradient
from opsmith.ops.involution import involution_weight_gradient as bundled_weight_gradient

KERNELS = Path(__file__).parents[2] / "src/opsmith/ops/involution/cpu"
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

involution: Any = opsmith.operator("candidates::involution")(bundled.reference)
input_gradient: Any = opsmith.operator("candidates::involution_input_gradient")(
    bundled_input_gradient.reference
)
weight_gradient: Any = opsmith.operator("candidates::involution_weight_gradient")(
    bundled_weight_gradient.reference
)

involution.gradients(
    input=lambda grad, weight, input_shape, stride, padding, dilation: input_gradient(
        grad, weight, input_shape[2:], stride, padding, dilation
    ),
    weight=lambda grad, input, weight_shape, stride, padding, dilation: weight_gradient(
        grad, input, weight_shape[1], weight_shape[2:4], stride, padding, dilation
    ),
)


def attach(dtypes: Sequence[torch.dtype] = DTYPES) -> None:
    """Give the three operators their kernels, for some dtypes: seconds to compile, once on a machine."""
    kernels = {"forward": involution, "input_gradient": input_gradient, "weight_gradient": weight_gradient}
    for entry, operator in kernels.items():
        operator.kernel(
            "cpu", cpp_file=KERNELS / f"{entry}.cpp", entry=entry, dtypes=list(dtypes), strict=True
        )
