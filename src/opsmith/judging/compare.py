"""Closeness of tensors: one rule with a bound, and the difference to report if the rule is violated.

Two elements agree if they are equal (nan equals nan), or if their distance is finite and not larger than the
bound of that element (`is_close`). There are three kinds of bounds: the rounding of a dtype (`answer.Bound`),
the measured noise of finite differences (`finite_differences.NumericalGradient`), and a share of the largest
element, for two runs of one computation (`within_rounding`) and for hypotheses (`share_of_largest`).
"""

from __future__ import annotations

import cmath
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.judging.constants import half_of_digits
from opsmith.judging.tensors import is_inexact


def is_same(got: Tensor, right: Tensor) -> Tensor:
    """Mark the elements that are equal, or both nan."""
    return (got == right) | ((got != got) & (right != right))


def is_close(got: Tensor, right: Tensor, bound: Tensor | float) -> Tensor:
    """Mark the elements that agree: they are equal, or at a finite distance that the bound allows.

    Args:
        got: The computed tensor; floating or complex.
        right: The right tensor, of the same shape or a shape that broadcasts to it.
        bound: The maximum distance of each element, or of all elements.

    Example:
        >>> is_close(torch.tensor([1.0, torch.inf, torch.nan]), torch.tensor([1.1, 0.0, torch.nan]), 0.2)
        tensor([ True, False,  True])
    """
    distance = (got - right).abs().to(torch.float64)
    return is_same(got, right) | (distance.isfinite() & (distance <= bound))


def all_close(got: Tensor, right: Tensor, bound: Tensor | float) -> bool:
    """Return True if two tensors have the same shape and every element agrees."""
    if are_equal(got, right):
        return True
    return got.shape == right.shape and bool(is_close(got, right, bound).all())


def are_equal(got: Tensor, right: Tensor) -> bool:
    """Return True if two tensors of the same kind are equal and have no nan; False proves nothing.

    Most compared tensors are equal, and this takes only one operation.
    """
    alike = got.dtype == right.dtype and got.device == right.device
    return alike and got.shape == right.shape and torch.equal(got, right)


def all_finite(tensor: Tensor) -> bool:
    """Return True if every element is finite; usually a finite sum shows this, in two operations.

    Example:
        >>> [all_finite(torch.tensor([1e38, each])) for each in (1.0, 3e38, torch.inf)]
        [True, True, False]
    """
    plain = tensor.detach()
    summed = plain.element_size() > 1 and cmath.isfinite(plain.sum().item())  # torch adds no floats of 8 bits
    return summed or bool(plain.isfinite().all())


def share_of_largest(share: float, *tensors: Tensor) -> float:
    """Compute the bound that is a share of the largest finite element of some tensors.

    Example:
        >>> share_of_largest(0.5, torch.tensor([1.0, -4.0]), torch.tensor([torch.inf]))
        2.0
    """
    return share * max(map(largest_magnitude, tensors))


def within_rounding(one: Tensor, other: Tensor, share: float | None = None) -> bool:
    """Return True if rounding explains a difference: numbers agree to a share of the largest element.

    The default share is half of the digits of their dtype. Numbers that are not finite must be equal. Below
    the smallest normal number, a dtype has few digits, or none if a thread flushes such numbers to zero.
    """
    if not is_inexact(one) or one.dtype != other.dtype:
        return False
    known = torch.finfo(one.dtype)
    bound = share_of_largest(half_of_digits(one.dtype) if share is None else share, one, other)
    return all_close(one, other, max(known.tiny, bound))


def differ_beyond_rounding(one: Tensor | None, other: Tensor | None) -> bool:
    """Return True if two tensors differ by more than rounding; nan equals nan, and None equals None.

    Example:
        >>> differ_beyond_rounding(torch.tensor(0.1) * 3, torch.tensor(0.3))
        False
        >>> differ_beyond_rounding(torch.tensor(1), torch.tensor(2))
        True
    """
    if one is None or other is None:
        return one is not other
    if same_bits(one, other):
        return False
    apart = one.dtype != other.dtype or exact_difference(other, one) is not None
    return apart and not within_rounding(one, other)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are equal bit for bit: nan equals nan, and -0.0 differs from 0.0.

    Example:
        >>> same_bits(torch.tensor(0.0), torch.tensor(-0.0))
        False
    """
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    if one.dtype not in _BITS and not one.is_complex():
        return torch.equal(one, other)
    return torch.equal(_bits(one), _bits(other))


_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def _bits(tensor: Tensor) -> Tensor:
    """Return integers with the same bits."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj().resolve_neg())
    return (plain.resolve_neg() if plain.is_neg() else plain).view(_BITS[plain.dtype])


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor as one row of bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg().flatten()
    # A single element counts as contiguous with any stride, and a view as bytes needs a stride of 1.
    return plain.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def largest_magnitude(tensor: Tensor) -> float:
    """Return the largest absolute value of a finite element; 0 if there is none."""
    sizes = tensor.detach().abs()
    sizes = sizes[sizes.isfinite()]
    return float(sizes.max()) if sizes.numel() else 0.0


def in_double(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU, in float64 or complex128, detached from autograd."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    return plain.to(torch.complex128 if plain.is_complex() else torch.float64)


FAR = 1e15
"""Number of units beyond which no digit is right, so that the exact number means nothing."""


@dataclass(frozen=True)
class Difference:
    """The element of a tensor that is furthest from its right value.

    Args:
        index: Index of the element.
        got: Its value.
        expected: The right value.
        wrong: Number of elements outside the bound.
        total: Number of elements.
        units: Distance in units; None for exact values.
        allowed: Distance in units that the bound allows.
        unit: Name of the unit.
        aspect: Aspect in which whole tensors differ, if elements cannot be compared; then `got` and
            `expected` are its texts. It is an aspect of `form_difference`; `count`, for the number of a
            call's outputs; `graph`, if autograd follows only one of both; or `result`, for random numbers.
    """

    index: tuple[int, ...]
    got: Any
    expected: Any
    wrong: int = 0
    total: int = 0
    units: float | None = None
    allowed: float | None = None
    unit: str = "rounding units"
    aspect: str = ""

    def __str__(self) -> str:
        if self.aspect:
            words = {"form": "it is", "graph": "it has"}.get(self.aspect, f"it has the {self.aspect}")
            return f"{words} {self.got}, where {self.expected} is right"
        prefix = f"at {list(self.index)} " if self.index else ""
        count = f"; {self.wrong} of {self.total} elements are wrong" if self.total > 1 else ""
        got, expected = distinct_texts(self.got, self.expected)
        return f"{prefix}it is {got} where {expected} is right{count}"

    def evidence(self) -> dict[str, Any]:
        """Return the difference as evidence of a failure."""
        if self.aspect:
            return {"got": self.got, "expected": self.expected}
        found: dict[str, Any] = {
            "index": list(self.index),
            "got": self.got,
            "expected": self.expected,
            "wrong elements": f"{self.wrong} of {self.total}",
        }
        if self.units is not None and self.allowed is not None:
            far = not self.units < FAR
            found[f"{self.unit} off"] = f"more than {FAR:g}" if far else float(f"{self.units:.3g}")
            found[f"{self.unit} allowed"] = float(f"{self.allowed:.3g}")
        return found


def worst_difference(
    got: Tensor,
    expected: Tensor,
    unit: Tensor,
    allowed: float = 1.0,
    judged: Tensor | None = None,
) -> Difference | None:
    """Find the element furthest outside of its bound; None if all agree.

    Args:
        got: The computed tensor.
        expected: The right tensor, of the same shape.
        unit: Unit of each element's distance.
        allowed: Maximum error of an element in units; with `unit`, it is the bound of the rule.
        judged: Mask of the elements that count; all by default.
    """
    if are_equal(got, expected):
        return None
    actual = got.detach().to(expected.dtype)
    # An infinity to which the coarser dtype rounds a right number is right.
    close = is_close(actual, expected, allowed * unit) | (actual == expected.to(got.dtype).to(expected.dtype))
    wrong = ~close if judged is None else judged & ~close
    if not wrong.any():
        return None
    units = ((actual - expected).abs() / unit).nan_to_num(float("inf"), float("inf"))
    index = _index_of_largest(torch.where(wrong, units, 0.0))
    value = got.detach()[index].item()
    right, count = expected[index].item(), int(wrong.sum())
    return Difference(index, value, right, count, got.numel(), float(units[index]), allowed)


def exact_difference(got: Tensor, *right: Tensor) -> Difference | None:
    """Find the first element that equals no right tensor's, or a difference of shape; nan equals nan.

    The first right tensor is shown; the others count as right, too.
    """
    if any(are_equal(got, each) for each in right):
        return None
    actual = got.detach()
    if any(each.shape != actual.shape for each in right):
        return Difference((), str(list(actual.shape)), str(list(right[0].shape)), aspect="shape")
    same = torch.zeros(actual.shape, dtype=torch.bool, device=actual.device)
    for each in right:
        same |= is_same(actual, each.detach().to(actual.device))
    if same.all():
        return None
    index = _index_of_largest(~same)
    return Difference(index, actual[index].item(), right[0][index].item(), int((~same).sum()), got.numel())


def _index_of_largest(score: Tensor) -> tuple[int, ...]:
    return unravel(int(score.to(torch.float64).argmax()), score.shape)


def unravel(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of an element from its position in the flattened tensor.

    Example:
        >>> unravel(5, [2, 3])
        (1, 2)
    """
    return tuple(int(each) for each in torch.unravel_index(torch.tensor(position), tuple(shape)))


def distinct_texts(one: complex | float | int | bool, other: complex | float | int | bool) -> tuple[str, str]:
    """Format two numbers with enough digits to make them differ, at least six."""
    digits = next((d for d in (6, 9, 12) if _number(one, d) != _number(other, d)), 17)
    return _number(one, digits), _number(other, digits)


def _number(value: complex | float | int | bool, digits: int) -> str:
    return f"{value:.{digits}g}" if isinstance(value, float | complex) else str(value)


def describe_difference(one: Tensor | None, other: Tensor | None) -> str:
    """Describe the difference between the right tensor, given first, and a computed tensor."""
    form = form_difference(other, one)
    return str(form if one is None or other is None or form else exact_difference(other, one))


def form_difference(got: Tensor | None, right: Tensor | None, *, strides: bool = False) -> Difference | None:
    """Find the first difference between a tensor and the right tensor that is not in numbers; else None.

    Its aspect is `form` if one of both is None, else `shape`, `dtype`, `device`, `layout` or `stride`.
    """
    if got is None or right is None:
        texts = ["None" if each is None else "a tensor" for each in (got, right)]
        return None if got is right else Difference((), texts[0], texts[1], aspect="form")
    pairs = {
        "shape": (list(got.shape), list(right.shape)),
        "dtype": (got.dtype, right.dtype),
        "device": (got.device.type, right.device.type),
        "layout": (got.layout, right.layout),
    }
    found = next((aspect for aspect, (one, other) in pairs.items() if one != other), None)
    if found is not None:
        one, other = pairs[found]
        return Difference((), str(one), str(other), aspect=found)
    if strides and _relevant_strides(got) != _relevant_strides(right):
        return Difference((), str(list(got.stride())), str(list(right.stride())), aspect="stride")
    return None


def _relevant_strides(tensor: Tensor) -> list[int]:
    """Return the strides that matter: none for an empty tensor, and none for a dimension of size 1."""
    if not tensor.numel():
        return []
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


@dataclass(frozen=True)
class SavedBits:
    """A tensor with a copy of its bits, to detect writes."""

    tensor: Tensor
    before: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> SavedBits:
        """Copy the current bits of a tensor."""
        return cls(tensor, tensor.detach().clone())

    def written(self) -> str | None:
        """Describe the writes since then; None if no bit has changed."""
        now = self.tensor.detach()
        if same_bits(now, self.before):
            return None
        return describe_write(exact_difference(now, self.before))


def describe_write(difference: Difference | None) -> str:
    """Describe a write; if no number differs, only bits do: -0.0, or a different nan."""
    return str(difference) if difference is not None else "other bits for the same numbers (-0.0, or a nan)"
