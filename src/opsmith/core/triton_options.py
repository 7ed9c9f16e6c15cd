"""What `op.kernel("cuda", triton=...)` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict


class TritonOptions(TypedDict, total=False):
    """A kernel in Triton, and how it is launched.

    Attributes:
        triton: A function whose parameters are named after what they get; plain, or decorated by Triton.
        grid: How many programs of it run: up to three numbers, or a function of what it names.
        constants: What its other parameters get: values, or functions of what they name; `num_warps` too.
        layouts: Tensors that it wants `channels-last`, or `contiguous` although it takes their strides.
        dtypes: What it takes of floating tensors; float16, bfloat16 and float32 by default.
        strict: Whether it is an error that Triton is missing.
    """

    triton: Callable[..., Any]
    grid: int | Sequence[int] | Callable[..., Any]
    constants: Mapping[str, Any]
    layouts: Mapping[str, str]
    dtypes: Any
    strict: bool


WORDS = ("grid", "constants", "layouts")
"""The words that say how it is launched."""
