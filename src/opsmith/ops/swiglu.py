"""SwiGLU gate, from the second half of a language model's block, in place.

Source: N. Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202, equation 5.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import opsmith


@opsmith.operator(
    "opsmith::swiglu_", mutates=["gate"], returns="gate", shapes="gate: ... N, up: ... N -> ... N"
)
def swiglu_(gate: Tensor, up: Tensor) -> Tensor:
    """Write gate sigmoid(gate) up into the gate.

    Args:
        gate: [..., N], floating; written. 16 bits are computed in float32.
        up: [..., N], of the dtype of the gate. Gate and up may be halves of one tensor.

    Returns:
        gate.

    Raises:
        ShapeError, MutationError: If a shape is wrong, or a tensor cannot be written.

    Example:
        >>> import torch
        >>> swiglu_(torch.tensor([0.0, 1.0]), torch.tensor([5.0, 2.0]))
        tensor([0.0000, 1.4621])
    """
    wide = (gate.float(), up.float()) if gate.element_size() < 4 else (gate.clone(), up)
    return gate.copy_(F.silu(wide[0]) * wide[1])  # a gradient needs the old gate: a copy


swiglu_.kernel(
    "cpu", cpp_file="swiglu.cpp", dtypes=[torch.float16, torch.bfloat16, torch.float32, torch.float64]
)


@swiglu_.samples
def _(make: opsmith.Make) -> Iterator[Any]:
    for shape in ((4, 5), (2, 3, 70), (7,), (0, 3)):
        yield make(*shape), make(*shape)
