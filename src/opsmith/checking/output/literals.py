"""Values as Python code, in the form that a person would write."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

MOST_ELEMENTS = 64
"""Maximum number of elements that a script writes out."""

DIGITS = 4
"""Number of digits of numbers that may be rounded."""

_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def writable(value: Any) -> bool:
    """True if a value can be written as code."""
    if isinstance(value, list | tuple):
        return all(writable(item) for item in value)
    if isinstance(value, Enum):
        return "<locals>" not in type(value).__qualname__
    return value is None or isinstance(value, (Tensor, torch.Generator, *_PLAIN))


def imports(values: Sequence[Any]) -> list[str]:
    """Imports that the code of the values needs."""
    kinds = {type(value) for value in values if isinstance(value, Enum)}
    outer = {(kind.__module__, kind.__qualname__.partition(".")[0]) for kind in kinds}
    return [f"from {module} import {name}" for module, name in sorted(outer)]


def written(value: Any, *, rounded: bool = False) -> str:
    """A value as code.

    Args:
        value: A value that `writable` accepts.
        rounded: True to write floating numbers with a few digits.

    Example:
        >>> import torch
        >>> written(torch.ones(1).expand(2, 3))
        'torch.tensor([[1.0]]).expand(2, 3)'
        >>> written([torch.zeros(0, 2, dtype=torch.int64), None, 0.5])
        '[torch.empty(0, 2, dtype=torch.int64), None, 0.5]'
    """
    if isinstance(value, list):
        return f"[{', '.join(written(item, rounded=rounded) for item in value)}]"
    if isinstance(value, torch.Generator):
        device = "" if value.device.type == "cpu" else repr(value.device.type)
        return f"torch.Generator({device}).manual_seed({value.initial_seed()})"
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, float):
        return _number(repr(value))
    return _tensor(value, rounded) if isinstance(value, Tensor) else repr(value)


def _tensor(value: Tensor, rounded: bool) -> str:
    plain = value.detach().cpu().resolve_conj().resolve_neg()
    for dimension, stride in enumerate(plain.stride()):
        if stride == 0:  # an expanded dimension is in memory only once
            plain = plain.narrow(dimension, 0, min(1, plain.shape[dimension]))
    form = _form(value)
    if plain.numel():
        text = f"torch.tensor({_numbers(plain, rounded)}{form})"
    else:
        text = f"torch.empty({_sizes(plain.shape)}{form})"
    turned = _turned(plain)
    if turned is not None:
        turn = f".permute({_sizes(turned)})" if turned != (1, 0) else ".mT"
        text = f"{text}{turn}.contiguous(){_back(turned)}"
    elif not plain.is_contiguous() and plain.numel():
        strides, extra = list(plain.stride()), form
        text = f"torch.empty_strided({list(plain.shape)}, {strides}{extra}).copy_({text})"
    if plain.shape != value.shape:
        text = f"{text}.expand({_sizes(value.shape)})"
    return f"{text}.requires_grad_()" if value.requires_grad else text


def _form(value: Tensor) -> str:
    """Keyword arguments for dtype and device, if they are not the defaults."""
    device = f", device={value.device.type!r}" if value.device.type != "cpu" else ""
    usual = value.dtype == torch.float32 or (value.dtype in (torch.int64, torch.bool) and value.numel())
    return ("" if usual else f", dtype={value.dtype}") + device


def _sizes(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) or "()"


def _turned(plain: Tensor) -> tuple[int, ...] | None:
    """The permutation of dimensions that makes a tensor contiguous, if there is one."""
    if plain.is_contiguous() or plain.dim() < 2:
        return None
    order = tuple(sorted(range(plain.dim()), key=lambda at: (-plain.stride()[at], at)))
    return order if plain.permute(order).is_contiguous() else None


def _back(order: tuple[int, ...]) -> str:
    if order == (1, 0):
        return ".mT"
    return f".permute({_sizes([order.index(at) for at in range(len(order))])})"


def _numbers(plain: Tensor, rounded: bool) -> str:
    listed = plain.tolist()
    return _number(repr(_rounded(listed) if rounded else listed))


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, complex):
        return complex(_rounded(value.real), _rounded(value.imag))
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _number(text: str) -> str:
    return text.replace("nan", "torch.nan").replace("inf", "torch.inf")


def drawn(value: Any) -> str | None:
    """Code that draws a random tensor like this one, in the range of its numbers; None if it needs more.

    Example:
        >>> import torch
        >>> drawn(torch.arange(200.0).view(2, 100))
        'torch.rand(2, 100) * 199 + 0'
    """
    if not isinstance(value, Tensor) or not value.numel():
        return None
    plain = value.detach().cpu()
    form, sizes = _form(value), _sizes(plain.shape)
    if plain.is_complex():
        text = f"torch.randn({sizes}{form})"
    elif plain.is_floating_point():
        low, high = float(plain.min()), float(plain.max())
        if not plain.isfinite().all():
            return None
        text = f"torch.rand({sizes}{form}) * {high - low:.3g} + {low:.3g}"
        text = f"({text})" if value.requires_grad else text
    elif plain.dtype == torch.bool:
        text = f"torch.rand({sizes}) < 0.5"
    else:
        text = f"torch.randint({int(plain.min())}, {int(plain.max()) + 1}, {tuple(plain.shape)}{form})"
    return f"{text}.requires_grad_()" if value.requires_grad else text
