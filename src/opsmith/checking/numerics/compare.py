"""Where two tensors differ most, and what they look like there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.samples.sample import is_inexact

FAR = 1e15
"""Beyond so many units no digit is right, and how many there are says nothing."""


@dataclass(frozen=True)
class Difference:
    """The element at which a tensor is furthest from what it should be.

    Args:
        index: Place of the element.
        got: Its value.
        expected: The right value.
        wrong: How many elements are outside the bound.
        total: How many elements there are.
        units: Distance, in units; None for exact values.
        allowed: How many units would have been right.
        unit: What the units are.
        form: In what the whole tensors differ, where no element of the one belongs to one of the other.
    """

    index: tuple[int, ...]
    got: complex | float | int | bool
    expected: complex | float | int | bool
    wrong: int
    total: int
    units: float | None = None
    allowed: float | None = None
    unit: str = "rounding units"
    form: str = ""

    def __str__(self) -> str:
        if self.form:
            return self.form
        place = f"at {list(self.index)} " if self.index else ""
        count = f"; {self.wrong} of {self.total} elements are wrong" if self.total > 1 else ""
        got, expected = _told_apart(self.got, self.expected)
        return f"{place}it is {got} where {expected} is right{count}"

    def evidence(self) -> dict[str, Any]:
        """The difference as a report keeps it."""
        if self.form:
            return {"form": self.form}
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


def largest(got: Tensor, expected: Tensor, unit: Tensor, allowed: float, judged: Tensor) -> Difference | None:
    """The element furthest outside its bound; None where all are inside.

    Args:
        got: What came.
        expected: What is right, of the same shape.
        unit: Rounding unit of each element.
        allowed: How many units an element may be off.
        judged: Elements that count.
    """
    mine = got.detach().to(expected.dtype)
    distance = (mine - expected).abs() / unit
    # What is no number compares by being the same; so does an infinity that the narrower dtype has made.
    rounded = expected.to(got.dtype).to(expected.dtype)
    same = (mine == rounded) | (mine == expected) | (mine.isnan() & expected.isnan())
    distance = torch.where(same, 0.0, distance.nan_to_num(float("inf"), float("inf")))
    distance = torch.where(judged, distance, 0.0)
    wrong = distance > allowed
    if not wrong.any():
        return None
    index = _place(distance)
    return Difference(
        index,
        got.detach()[index].item(),
        expected[index].item(),
        int(wrong.sum()),
        got.numel(),
        float(distance[index]),
        allowed,
    )


def off_gradcheck(got: Tensor, expected: Tensor) -> Difference | None:
    """The element furthest outside the tolerances of `torch.autograd.gradcheck`, for finite differences."""
    tolerance = 1e-5 + 1e-3 * expected.abs()
    found = largest(got, expected, tolerance, 1.0, torch.ones_like(tolerance, dtype=torch.bool))
    return None if found is None else replace(found, unit="tolerances of gradcheck")


def off_linear(got: Tensor, expected: Tensor, size: float, tolerated: float) -> Difference | None:
    """The element furthest from a sum of others, if it is off by more than a part of the largest summand.

    Args:
        got: What came, in float64.
        expected: The sum, of the same shape.
        size: Size of the largest summand.
        tolerated: That part.
    """
    tolerance = torch.full(expected.shape, tolerated * size, dtype=torch.float64)
    tolerance = tolerance.to(expected.device) + torch.finfo(torch.float64).tiny
    found = largest(got, expected, tolerance, 1.0, torch.ones_like(tolerance, dtype=torch.bool))
    return None if found is None else replace(found, unit="tolerances")


def unequal(got: Tensor, *right: Tensor) -> Difference | None:
    """The first element that is exactly none of the right ones, or another shape; nan equals nan.

    Args:
        got: What came.
        *right: What is right, and what is as good.
    """
    mine = got.detach()
    if any(each.shape != mine.shape for each in right):
        form = f"its shape is {list(mine.shape)} where {list(right[0].shape)} is right"
        return Difference((), mine.numel(), right[0].numel(), mine.numel(), mine.numel(), form=form)
    same = torch.zeros(mine.shape, dtype=torch.bool, device=mine.device)
    for each in right:
        theirs = each.detach().to(mine.device)
        same |= (mine == theirs) | ((mine != mine) & (theirs != theirs))
    if same.all():
        return None
    index = _place(~same)
    return Difference(index, mine[index].item(), right[0][index].item(), int((~same).sum()), got.numel())


def form_fault(got: Tensor, expected: Tensor, *, strides: bool) -> tuple[str, str, str] | None:
    """In what two tensors differ but for values, what came, and what is expected.

    It is the `shape`, the `dtype`, the `device`, the `layout`, or the `stride`, the first of these.
    """
    if got.shape != expected.shape:
        return "shape", str(list(got.shape)), str(list(expected.shape))
    if got.dtype != expected.dtype:
        return "dtype", str(got.dtype), str(expected.dtype)
    if got.device.type != expected.device.type:
        return "device", str(got.device), str(expected.device)
    if got.layout != expected.layout:
        return "layout", str(got.layout), str(expected.layout)
    if strides and _walked(got) != _walked(expected):
        return "stride", str(list(got.stride())), str(list(expected.stride()))
    return None


def _walked(tensor: Tensor) -> list[int]:
    """The strides that say where elements lie: none for an empty tensor, none for a dimension of one."""
    if not tensor.numel():
        return []
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def _place(score: Tensor) -> tuple[int, ...]:
    position = score.to(torch.float64).argmax()
    return tuple(int(i) for i in torch.unravel_index(position, score.shape)) if score.dim() else ()


def _told_apart(one: complex | float | int | bool, other: complex | float | int | bool) -> tuple[str, str]:
    """Two numbers with as many digits as tell them apart, six at least."""
    digits = next((d for d in (6, 9, 12) if _number(one, d) != _number(other, d)), 17)
    return _number(one, digits), _number(other, digits)


def _number(value: complex | float | int | bool, digits: int) -> str:
    return f"{value:.{digits}g}" if isinstance(value, float | complex) else str(value)


def differ(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors differ by more than rounding; nan equals nan, and nothing is only like nothing.

    Example:
        >>> differ(torch.tensor(0.1) * 3, torch.tensor(0.3)), differ(torch.tensor(1), torch.tensor(2))
        (False, True)
    """
    if one is None or other is None:
        return one is not other
    if same_bits(one, other):
        return False
    if one.shape != other.shape or one.dtype != other.dtype:
        return True
    return unequal(other, one) is not None and not by_rounding(one, other)


def by_rounding(one: Tensor, other: Tensor) -> bool:
    """Whether rounding explains a difference: finite numbers are alike, and the others the same."""
    if not is_inexact(one) or one.dtype != other.dtype or one.shape != other.shape:
        return False
    odd = ~(one.isfinite() & other.isfinite())
    if bool(odd.any()) and unequal(other[odd], one[odd]) is not None:
        return False
    coarse = torch.finfo(one.dtype).eps ** 0.5
    return alike(other.masked_fill(odd, 0), one.masked_fill(odd, 0), coarse)


def what_differs(one: Tensor | None, other: Tensor | None) -> str:
    """In what a tensor differs from the right one, in words.

    Args:
        one: The right one.
        other: What came.
    """
    if one is None or other is None:
        return "there is none (None)" if other is None else "there is one where there was none"
    if one.shape != other.shape:
        return f"its shape is {list(other.shape)} where {list(one.shape)} is right"
    if one.dtype != other.dtype:
        return f"its dtype is {other.dtype} where {one.dtype} is right"
    return str(unequal(other, one))


@dataclass(frozen=True)
class Kept:
    """A tensor, and its bits as they were.

    Args:
        tensor: The tensor.
        before: A copy of it.
    """

    tensor: Tensor
    before: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> Kept:
        """Keep the bits that a tensor has now."""
        return cls(tensor, tensor.detach().clone())

    def written(self) -> str | None:
        """What was written since, in words; None where every bit is as it was."""
        now = self.tensor.detach()
        if same_bits(now, self.before):
            return None
        return written_words(unequal(now, self.before))


def written_words(difference: Difference | None) -> str:
    """A difference in words; without one, the bits differ where the numbers are equal: -0.0, or a nan."""
    return str(difference) if difference is not None else "other bits for the same numbers (-0.0, or a nan)"


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same, bit for bit: nan equals nan, and -0.0 is not 0.0.

    Example:
        >>> same_bits(torch.tensor(0.0), torch.tensor(-0.0))
        False
    """
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().flatten()
    # Even of what counts as contiguous, a single element can have any stride.
    return plain.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def alike(got: Tensor, expected: Tensor, coarse: float) -> bool:
    """Whether two tensors agree to a fraction `coarse` of the largest element."""
    if got.shape != expected.shape or not (bool(got.isfinite().all()) and bool(expected.isfinite().all())):
        return False
    largest = max(peak(expected), peak(got))
    return peak(got - expected) <= coarse * largest


def peak(tensor: Tensor) -> float:
    """The largest size of a finite element; 0 where there is none."""
    sizes = tensor.detach().abs()
    sizes = sizes[sizes.isfinite()]
    return float(sizes.max()) if sizes.numel() else 0.0


def wide(tensor: Tensor) -> Tensor:
    """A tensor on the CPU, in float64 or complex128, apart from autograd."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    return plain.to(torch.complex128 if plain.is_complex() else torch.float64)
