"""Functions of libdevice, which Triton's interpreter lacks, computed by functions of torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SAME = (
    *("abs", "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "ceil", "copysign", "cos", "cosh"),
    *("erf", "erfc", "erfinv", "exp", "exp2", "expm1", "floor", "fmod", "hypot", "isfinite", "isinf"),
    *("isnan", "lgamma", "log", "log10", "log1p", "log2", "pow", "rsqrt", "signbit", "sin", "sinh", "sqrt"),
    *("tan", "tanh", "trunc", "add", "div", "divide", "mul", "sub"),
)
"""Functions that torch has under the same name."""

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(torch, name) for name in SAME},
    "cbrt": lambda x: torch.copysign(x.abs() ** (1 / 3), x),
    "cospi": lambda x: torch.cos(torch.pi * x),
    "cyl_bessel_i0": torch.special.i0,
    "cyl_bessel_i1": torch.special.i1,
    "erfcx": torch.special.erfcx,
    "exp10": lambda x: 10**x,
    "fdim": lambda x, y: (x - y).clamp_min(0),
    "finite": torch.isfinite,
    "fma": lambda x, y, z: x * y + z,
    "j0": torch.special.bessel_j0,
    "j1": torch.special.bessel_j1,
    "nearbyint": torch.round,
    "normcdf": torch.special.ndtr,
    "normcdfinv": torch.special.ndtri,
    "rcbrt": lambda x: torch.copysign(x.abs() ** (-1 / 3), x),
    "rcp": torch.reciprocal,
    "rhypot": lambda x, y: 1 / torch.hypot(x, y),
    "rint": torch.round,
    "round": lambda x: torch.copysign((x.abs() + 0.5).floor(), x),
    "saturate": lambda x: x.nan_to_num(0.0).clamp(0, 1),
    "sinpi": lambda x: torch.sin(torch.pi * x),
    "y0": torch.special.bessel_y0,
    "y1": torch.special.bessel_y1,
}
"""Functions of tensors in float64, by name: without `fast_`, the rounding `_rn`, and the letter of a type."""


@functools.cache
def bridged(name: str) -> Callable[..., Any]:
    """Return a function of libdevice, for tensors of the interpreter.

    The returned function raises NotImplementedError if no function of torch can compute it.

    Args:
        name: Name of the function in `triton.language.extra.libdevice`.
    """
    short = name.removeprefix("fast_").removesuffix("_rn")
    function = FUNCTIONS.get(short) or FUNCTIONS.get(short.rstrip("fd"))

    def call(*args: Any, _semantic: Any = None) -> Any:
        if function is None:
            raise NotImplementedError(f"Triton's interpreter does not have `libdevice.{name}`")
        return _elementwise(name, function, args)

    return call


def _elementwise(name: str, function: Callable[..., Tensor], args: tuple[Any, ...]) -> Any:
    """Compute a function of tensors of the interpreter, in float64.

    Raises:
        TypeError: For 16-bit floats, which libdevice itself does not take either.
    """
    import numpy
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle, interpreter_semantic

    tensors = [interpreter_semantic.to_tensor(each) for each in args]
    for each in tensors:
        if each.dtype.is_floating() and each.dtype.primitive_bitwidth < 32:
            raise TypeError(f"`libdevice.{name}` takes float32 or float64, not {each.dtype}")
    exact = [torch.from_numpy(numpy.asarray(each.handle.data).astype(numpy.float64)) for each in tensors]
    found = function(*exact).numpy()
    dtype = tl.int1 if found.dtype == bool else tensors[0].dtype
    data = found.astype(tensors[0].handle.data.dtype) if found.dtype != bool else found
    blocks = any(each.type.is_block() for each in tensors)
    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)) if blocks else dtype)
