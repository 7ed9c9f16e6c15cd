"""The template of `opsmith new` has types as strict as those of opsmith."""

from __future__ import annotations

from typing import assert_type

import torch
from my_kernels import Swish, swish
from torch import Tensor

x, beta = torch.ones(2, 3), torch.ones(3)
assert_type(swish(x, beta), Tensor)
swish(x)  # type: ignore[call-arg]
swish(x, 1.0)  # type: ignore[arg-type]
assert_type(Swish(3)(x), Tensor)
