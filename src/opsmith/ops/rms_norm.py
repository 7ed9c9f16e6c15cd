"""Normalisation by the root mean square, as language models use it, and its fused form with a residual.

Source: B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019, arXiv:1910.07467.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import opsmith

_DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


_SHORT = "x.shape[-1] <= 128"
"""Condition for a row that a warp computes in CUDA; a block computes a longer row."""
_CUDA: dict[str, Any] = {"cuda_file": "rms_norm.cu", "dtypes": _DTYPES, "max_spills": 0}
_BLOCK = f"32 if {_SHORT} else 256", f"8 if {_SHORT} else 1"


def _grid(rows: str) -> str:
    return f"ceil({rows} / (8 if {_SHORT} else 1))"


def _normalised(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Compute x rstd weight and rstd = 1 / √(mean(x²) + eps), in float32 if x has 16 bits."""
    wide = x.float() if x.element_size() < 4 else x
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = wide * rstd if weight is None else wide * rstd * weight
    return y.to(x.dtype), rstd


def _refuse_whole_numbers(x: Tensor) -> None:
    if not (x.is_floating_point() or x.is_complex()):
        raise ValueError(f"x must be floating, not {x.dtype}")


def _or_ones(weight: Tensor | None, x: Tensor) -> Tensor:
    return x.new_ones(x.shape[-1]) if weight is None else weight


@opsmith.operator(
    "opsmith::rms_norm_backward",
    shapes="cotangent: ... N, x: ... N, weight: N, rstd: ... 1 -> ... N, N",
)
def rms_norm_backward(cotangent: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `rms_norm`.

    Args:
        cotangent: [..., N], the gradient of the result.
        x: [..., N].
        weight: [N].
        rstd: [..., 1], 1 / √(mean(x²) + eps); float32 if x has 16 bits.

    Returns:
        The gradient of x, [..., N], and of the weight, [N], in their dtypes. With n = x rstd and
        g = cotangent weight, they are rstd (g - n mean(g n)), and the sum of cotangent n over all rows.

    Raises:
        ShapeError: If the shapes do not fit.

    Example:
        >>> import torch
        >>> x = torch.tensor([[3.0, 4.0]])
        >>> rms_norm_backward(torch.ones(1, 2), x, torch.ones(2), torch.tensor([[0.25]]))
        (tensor([[0.0859, 0.0312]]), tensor([0.7500, 1.0000]))
    """
    normal = x.to(rstd.dtype) * rstd
    wide = cotangent.to(rstd.dtype)
    inner = wide * weight
    grad_x = rstd * (inner - normal * (inner * normal).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), (wide * normal).sum_to_size(weight.shape).to(weight.dtype)


rms_norm_backward.kernel("cpu", cpp_file="rms_norm.cpp", dtypes=_DTYPES)
# Two blocks for each multiprocessor of a large GPU; the threads that share a row read four rows at once.
_BLOCKS = f"min(256, ceil(rstd.numel / (32 if {_SHORT} else 4)))"
rms_norm_backward.kernel(
    "cuda",
    **_CUDA,
    scratch={"sums": (f"{_BLOCKS} * (8 if {_SHORT} else 1)", "x.shape[-1]", "rstd")},
    launches=[
        opsmith.Launch(
            "rms_norm_backward(cotangent, x, weight, rstd, result0, sums)", grid=_BLOCKS, block=_BLOCK
        ),
        opsmith.Launch(
            "sum_of_rows(sums, result1)", grid="ceil(result1.numel * rstd.itemsize / 32)", block=256
        ),
    ],
)


@opsmith.operator(
    "opsmith::rms_norm", hidden=("rstd",), shapes="x: ... N, weight: N -> ... N, ... 1", batching="..."
)
def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Divide each row by its root mean square: y = weight x / √(mean(x²) + eps).

    Args:
        x: [..., N], floating. 16 bits are computed in float32.
        weight: [N], or None for ones.
        eps: Number that is added to the mean square.

    Returns:
        [..., N], in the dtype of x.

    Raises:
        ShapeError: If the shapes do not fit.
        ValueError: If x holds whole numbers.

    Example:
        >>> import torch
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0) * 12.5**0.5
        tensor([[3., 8.]])
    """
    _refuse_whole_numbers(x)
    return _normalised(x, weight, eps)


@rms_norm.gradients("x", "weight")
def _(grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor) -> dict[str, Tensor]:
    grad_x, grad_weight = rms_norm_backward(grad, x, _or_ones(weight, x), rstd)
    return {"x": grad_x, "weight": grad_weight}


rms_norm.kernel("cpu", cpp_file="rms_norm.cpp", dtypes=_DTYPES)
rms_norm.kernel("cuda", **_CUDA, grid=_grid("rstd.numel"), block=_BLOCK)


@opsmith.operator(
    "opsmith::add_rms_norm_",
    mutates=["x", "residual"],
    shapes="x: ... N, residual: ... N, weight: N ->",
)
def add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> None:
    """Add x to the residual, and write the normalised rows of the sum into x: the beginning of a block.

    residual <- residual + x, then x <- weight residual / √(mean(residual²) + eps).

    Args:
        x: [..., N], floating; written.
        residual: [..., N], of the dtype of x; written.
        weight: [N], or None for ones.
        eps: Number that is added to the mean square.

    Raises:
        ShapeError, MutationError: If a shape is wrong, or a tensor cannot be written.
        ValueError: If x holds whole numbers.

    Example:
        >>> import torch
        >>> x, residual = torch.tensor([1.0, 1.0]), torch.tensor([2.0, 3.0])
        >>> add_rms_norm_(x, residual, eps=0.0)
        >>> x * 12.5**0.5, residual
        (tensor([3., 4.]), tensor([3., 4.]))
    """
    _refuse_whole_numbers(x)
    residual.add_(x)
    x.copy_(_normalised(residual, weight, eps)[0])


add_rms_norm_.kernel("cpu", cpp_file="rms_norm.cpp", dtypes=_DTYPES)
add_rms_norm_.kernel("cuda", **_CUDA, grid=_grid("x.numel / x.shape[-1]"), block=_BLOCK)


@add_rms_norm_.gradients("x", "residual", "weight")
def _(
    grad_x: Tensor, grad_residual: Tensor, result_residual: Tensor, weight: Tensor | None, eps: float
) -> dict[str, Tensor]:
    rstd = _normalised(result_residual, None, eps)[1]
    grad_sum, grad_weight = rms_norm_backward(grad_x, result_residual, _or_ones(weight, grad_x), rstd)
    total = grad_residual + grad_sum
    return {"x": total, "residual": total, "weight": grad_weight}


@rms_norm.samples
def _(make: opsmith.Make) -> Iterator[Any]:
    yield make(4, 5), make(5)
    yield make(2, 3, 70), make(70), 1e-3
    yield make(3, 4), None
    yield make(7), make(7)
    yield make(0, 3), make(3)
    yield make(5, 6)[1:].mT, make(8)[::2]


@add_rms_norm_.samples
def _(make: opsmith.Make) -> Iterator[Any]:
    yield make(4, 5), make(4, 5), make(5)
    yield make(2, 3, 70), make(2, 3, 70), make(70), 1e-3
    yield make(3, 4), make(3, 4), None
    yield make(7), make(7), make(7)


@rms_norm_backward.samples
def _(make: opsmith.Make) -> Iterator[Any]:
    for shape in ((4, 5), (2, 3, 70), (7,), (0, 3)):
        x = make(*shape)
        yield make(*shape), x, make(shape[-1]), _normalised(x, None, 1e-6)[1]


RMSNorm = rms_norm.module(
    name="RMSNorm",
    sizes=("features",),
    parameters={"weight": ("features",)},
    init={"weight": opsmith.init.constant(1.0)},
    doc="""
    Example:
        >>> import torch
        >>> layer = RMSNorm(2, eps=0.0)
        >>> layer, layer(torch.full((1, 2), 5.0))
        (RMSNorm(features=2, eps=0.0, weight=True), tensor([[1., 1.]], grad_fn=<rms_normBackward>))
    """,
)
