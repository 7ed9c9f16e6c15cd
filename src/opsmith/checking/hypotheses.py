"""What a wrong tensor looks like: cheap guesses at the cause, each kept only if the numbers bear it out.

Two tensors are *alike* if they agree in half of the digits of their dtype: a guess that holds explains the
whole difference, and rounding does not hide it.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import combinations

import torch
from torch import Tensor

from opsmith.checking.causes import UNKNOWN


def explain_difference(got: Tensor | None, expected: Tensor) -> tuple[str, str]:
    """The cause of a difference, and the evidence in words; (`unknown`, "") where no guess holds.

    Args:
        got: What came; None where nothing came.
        expected: What is right, of the same shape.
    """
    if got is None:
        return "missing-gradient", "there is none (None)"
    right = expected.detach()
    mine = got.detach().to(right.dtype)
    coarse = max(torch.finfo(got.dtype).eps, torch.finfo(right.dtype).eps) ** 0.5
    narrowed = _narrowed(got, right)
    if narrowed is not None:
        return narrowed
    if alike(mine, right, coarse):  # so near that any guess about a large difference would hold as well
        return UNKNOWN, ""
    for cause, guess in GUESSES.items():
        evidence = guess(mine, right, coarse)
        if evidence is not None:
            return cause, evidence
    return UNKNOWN, ""


def _narrowed(got: Tensor, expected: Tensor) -> tuple[str, str] | None:
    """Whether every element is a number of a narrower dtype, and as near as that dtype allows."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if torch.finfo(dtype).eps <= torch.finfo(got.dtype).eps or got.is_complex():
            continue
        near = _peak(got.to(expected.dtype) - expected) <= 8 * torch.finfo(dtype).eps * _peak(expected)
        if near and torch.equal(got.to(dtype).to(got.dtype), got):
            name = str(dtype).removeprefix("torch.")
            return "precision", f"every element is a {name} number, so it was computed in {name}"
    return None


def alike(got: Tensor, expected: Tensor, coarse: float) -> bool:
    """Whether two tensors agree to a fraction `coarse` of the largest element."""
    if not (bool(got.isfinite().all()) and bool(expected.isfinite().all())):
        return False
    largest = max(_peak(expected), _peak(got))
    return _peak(got - expected) <= coarse * largest


def _nonfinite(got: Tensor, expected: Tensor, coarse: float) -> str | None:
    count = int((~got.isfinite() & expected.isfinite()).sum())
    return f"{count} of {got.numel()} elements are nan or infinite" if count else None


def _missing(got: Tensor, expected: Tensor, coarse: float) -> str | None:
    return "it is zero everywhere" if not got.any() and expected.any() else None


def _sign(got: Tensor, expected: Tensor, coarse: float) -> str | None:
    return "it is the right one times -1" if alike(got, -expected, coarse) else None


def _scale(got: Tensor, expected: Tensor, coarse: float) -> str | None:
    weight = float((expected.abs() ** 2).sum())
    if not weight or not got.any():
        return None
    factor = complex((expected.conj() * got).sum() / weight)
    if abs(factor - 1) <= coarse or not alike(
        got, expected * (factor if got.is_complex() else factor.real), coarse
    ):
        return None
    simple = _simple(factor, coarse)
    # One number is a multiple of any other: then only a whole factor, or one over it, is evidence.
    if int(expected.count_nonzero()) < 3 and (simple is None or 1 not in map(abs, simple.as_integer_ratio())):
        return None
    return f"it is the right one times {simple or _shown(factor)}"


def _conjugate(got: Tensor, expected: Tensor, coarse: float) -> str | None:
    if not expected.is_complex() or alike(expected, expected.conj(), coarse):
        return None
    return "it is the complex conjugate of the right one" if alike(got, expected.conj(), coarse) else None


def _transposed(got: Tensor, expected: Tensor, coarse: float) -> str | None:
    for first, second in combinations(range(got.dim()), 2):
        turned = expected.transpose(first, second)
        if turned.shape == got.shape and alike(got, turned, coarse):
            return f"dimensions {first} and {second} are swapped"
        # Right numbers in the memory order of the transpose: reshaped where it should have been transposed.
        if alike(got.reshape(turned.shape), turned, coarse):
            return f"it is laid out as if dimensions {first} and {second} were swapped"
    return None


def _permuted(got: Tensor, expected: Tensor, coarse: float) -> str | None:
    if got.is_complex() or got.numel() < 3:
        return None
    mine, right = got.flatten().sort().values, expected.flatten().sort().values
    return "it has the right values in another order" if alike(mine, right, coarse) else None


GUESSES: dict[str, Callable[[Tensor, Tensor, float], str | None]] = {
    "nan": _nonfinite,
    "missing-gradient": _missing,
    "sign": _sign,
    "conjugate": _conjugate,
    "scale": _scale,
    "transposed": _transposed,
    "permuted": _permuted,
}


def _peak(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _simple(factor: complex, coarse: float) -> Fraction | None:
    """A factor as a fraction of small numbers, if it is one."""
    if abs(factor.imag) > coarse * abs(factor):
        return None
    near = Fraction(factor.real).limit_denominator(64)
    return near if near and abs(factor.real - near) <= coarse * abs(factor) else None


def _shown(factor: complex) -> str:
    return f"{factor:.6g}" if abs(factor.imag) > 1e-12 * abs(factor) else f"{factor.real:.6g}"
