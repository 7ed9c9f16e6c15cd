"""The dtypes that a kernel in C++ or CUDA C++ can take, and their names."""

from __future__ import annotations

import torch

CPP_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "opsmith::Half",
    torch.bfloat16: "opsmith::BFloat16",
    torch.int64: "int64_t",
    torch.int32: "int32_t",
    torch.int16: "int16_t",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
    torch.bool: "bool",
}
"""dtypes, and their types in C++."""
DEFAULT_DTYPES = (torch.float32, torch.float64)
"""dtypes of a template kernel that is declared without `dtypes=`."""


def dtype_name(dtype: torch.dtype | None) -> str:
    """Return a dtype's name without its module.

    Example:
        >>> dtype_name(torch.float32)
        'float32'
    """
    return str(dtype).removeprefix("torch.")
