"""An activation, declared as a user would declare one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

import opsmith


@opsmith.operator("opsmith_tour::swish")
def swish(x: Tensor) -> Tensor:
    """Compute x sigmoid(x), element by element.

    Source: P. Ramachandran et al., "Searching for Activation Functions", arXiv:1710.05941, equation 1.

    Args:
        x: Any shape; floating.

    Returns:
        Shape and dtype of `x`.

    Example:
        >>> import torch
        >>> swish(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([-0.2689,  0.0000,  0.7311])
    """
    return x * x.sigmoid()


# With s = sigmoid(x): d/dx x s = s + x s (1 - s).
swish.gradients(x=lambda grad, x: grad * x.sigmoid() * (1 + x * (-x).sigmoid()))


@swish.samples
def _(make: opsmith.Make) -> Iterator[Any]:
    yield (make(3, 5),)
    yield (make(2, 4, 3, 3),)
    yield (make(),)
