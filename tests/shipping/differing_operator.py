"""Operator whose kernel differs between a library and the process that loads it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import opsmith

WRITTEN = "void differing(Contiguous<const float, 1> x, Contiguous<float, 1> y) {{ y[0] = x[0] + {number}; }}"


def declare(number: int) -> Any:
    """Declare an operator whose kernel adds this number."""

    @opsmith.operator("served::differing", shapes="x: N -> N")
    def differing(x: Tensor) -> Tensor:
        return x + number

    differing.kernel("cpu", cpp=WRITTEN.format(number=number))
    return differing
