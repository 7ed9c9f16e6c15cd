"""Conditions on the values beside each element that separate the wrong elements from the right ones.

A condition is evidence only if it is unlikely to fit by chance. There are C(n, k) ways to choose k wrong
elements of n. The more conditions are tried, the larger this number must be: its logarithm must not be below
the bits of the condition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

import torch
from torch import Tensor

from opsmith.checking.diagnosis.evidence import COMPARISONS
from opsmith.checking.diagnosis.observation import Observation
from opsmith.core.generate_like import WHOLE
from opsmith.judging.compare import in_double, largest_magnitude

PLAIN, THRESHOLD, BAND = 10.0, 16.0, 22.0
"""Bits of a condition: without a threshold, with one, with two."""

SLIPS = 0.02
"""Share of the elements of a condition that may be right by chance."""

TINY = 1e-3
"""Size relative to the largest element below which a fault does not show."""

CONSTANTS = 8
"""Largest number of distinct values that conditions of equality are made of."""
ABOUT = "about"


@dataclass(frozen=True)
class ElementTable:
    """The elements of all pairs, one pair after the other, with the values beside them.

    Args:
        wrong: Mask of the wrong elements.
        excused: Mask of the elements that are not evidence if they are right.
        columns: Numbers beside each element.
        marks: Truth values beside each element.
    """

    wrong: Tensor
    excused: Tensor
    columns: dict[Source, Tensor]
    marks: dict[str, Tensor]

    @classmethod
    def of(cls, pairs: Sequence[Observation], wrong: Callable[[Observation], Tensor]) -> ElementTable:
        """Build the table of some pairs."""
        masks = [wrong(pair) for pair in pairs]
        small = [negligible(pair, mask).flatten() for pair, mask in zip(pairs, masks, strict=True)]
        return cls(
            torch.cat([mask.flatten() for mask in masks]),
            torch.cat(small),
            _joined([values_beside(pair) for pair in pairs]),
            _joined([marks(pair) for pair in pairs]),
        )

    @property
    def bits(self) -> float:
        """Logarithm of the number of ways to choose so many elements, in bits."""
        counted = self.wrong | ~self.excused
        return chances(int(counted.sum()), int(self.wrong.sum()))

    def fits(self, chosen: Tensor) -> bool:
        """Return True if a condition holds for the wrong elements, and for no other that is evidence."""
        if bool((self.wrong & ~chosen).any()):
            return False
        extra = int((chosen & ~self.wrong & ~self.excused).sum())
        outside = int((~chosen & ~self.excused).sum())
        return outside > 0 and extra <= SLIPS * int(chosen.sum())


K = TypeVar("K")


def _joined(every: Sequence[Mapping[K, Tensor]]) -> dict[K, Tensor]:
    """Join the tensors that all pairs have, of one dtype."""
    return {
        name: torch.cat([each[name].flatten() for each in every])
        for name in every[0]
        if all(name in each for each in every) and len({each[name].dtype for each in every}) == 1
    }


def negligible(pair: Observation, wrong: Tensor) -> Tensor:
    """Mark the elements in which a fault does not show, since the right and the computed one are tiny.

    If the fault makes zeros nonzero, as a mask that is too wide does, every element is evidence.
    """
    size = pair.expected.abs()
    small = size <= TINY * largest_magnitude(pair.expected)
    return torch.zeros_like(small) if bool((wrong & (size <= pair.rounding)).any()) else small


def chances(many: int, chosen: int) -> float:
    """Compute the bits of one choice of so many elements among many."""
    if not 0 < chosen < many:
        return 0.0
    log_count = math.lgamma(many + 1) - math.lgamma(chosen + 1) - math.lgamma(many - chosen + 1)
    return log_count / math.log(2)


def conditions(table: ElementTable) -> Iterator[str]:
    """Yield the conditions that fit a table, the simplest first."""
    for bits, words, chosen in _candidates(table):
        if table.bits >= bits and table.fits(chosen):
            yield words


Candidate = tuple[float, str, Tensor]
"""Bits of a condition, its words, and the mask of the elements for which it holds, over all pairs in turn."""


def _candidates(table: ElementTable) -> Iterator[Candidate]:
    for (name, how), each in table.columns.items():
        if each.dtype == torch.bool:
            yield PLAIN, f"where {name} is True", each
            yield PLAIN, f"where {name} is False", ~each
        elif how.startswith("times"):
            yield PLAIN, f"where {name} occurs more than once", each > 1
            yield PLAIN, f"where {name} occurs once", each == 1
            yield PLAIN, f"where {name} does not occur", each == 0
        elif each.is_complex():
            for part, values in (("real", each.real), ("imaginary", each.imag)):
                yield PLAIN, f"where the {part} part of {name} is negative", values < 0
                yield PLAIN, f"where the {part} part of {name} is positive", values > 0
    plain = {
        source: each
        for source, each in table.columns.items()
        if each.dtype == torch.float64 and not source[1].startswith("times")
    }
    beside = [(name, each) for (name, how), each in plain.items() if how != "number"]
    for name, each in beside[:1]:
        yield from _against(name, each, "0", torch.zeros_like(each))
        yield from _constants(name, each)
        yield from (one for one in _thresholds(table, name, each) if ABOUT not in one[1])
    for name, each in beside[1:]:
        yield from _against(name, each, "0", torch.zeros_like(each))
    # Conditions on inputs alone are simpler than those on results and grad_outputs.
    given = {source: each for source, each in plain.items() if source[0].startswith("`")}
    for some in (given, plain):
        for ((first, how), first_values), ((other, kind), other_values) in combinations(some.items(), 2):
            if how == "number":
                continue
            yield from _against(first, first_values, other, other_values)
            if kind == "number":
                yield from _against(f"the size of {first}", first_values.abs(), other, other_values)
                yield from _against(first, first_values, f"minus {other}", -other_values)
        if some is given:
            yield from ((PLAIN, words, chosen) for words, chosen in table.marks.items())
            yield from _differing(table, given)
    for name, each in beside:
        yield from _constants(name, each)
    for name, each in beside:
        yield from _thresholds(table, name, each)
    for (name, _), each in table.columns.items():
        if each.is_complex():
            yield from _threshold(table, f"the size of {name}", each.abs())
    for name, each in beside:
        yield from _bands(table, name, each)


def _differing(table: ElementTable, given: dict[Source, Tensor]) -> Iterator[Candidate]:
    """Yield thresholds of the difference of two inputs."""
    for ((first, how), first_values), ((other, kind), other_values) in combinations(given.items(), 2):
        if "number" not in (how, kind):
            name = f"the difference of {first} and {other}"
            yield from _thresholds(table, name, first_values - other_values)
            yield from _bands(table, name, first_values - other_values)


def _constants(name: str, each: Tensor) -> Iterator[Candidate]:
    distinct, counts = each.unique(return_counts=True)
    for value in distinct[counts > 1][:CONSTANTS].tolist():
        yield PLAIN, f"where {name} is {value:g}", each == value
    whole = each == each.round()
    yield PLAIN, f"where {name} is a whole number", whole
    yield PLAIN, f"where {name} is not a whole number", ~whole


def _against(one: str, first_values: Tensor, other: str, other_values: Tensor) -> Iterator[Candidate]:
    for relation, words in COMPARISONS.items():
        yield PLAIN, f"where {one} {words[0]} {other}", relation(first_values, other_values)


def _thresholds(table: ElementTable, name: str, each: Tensor) -> Iterator[Candidate]:
    yield from _threshold(table, name, each)
    yield from _threshold(table, f"the size of {name}", each.abs())


def _threshold(table: ElementTable, name: str, each: Tensor) -> Iterator[Candidate]:
    """Yield conditions of a bound that separates the wrong elements from the others."""
    wrong, others = each[table.wrong], each[~table.wrong & ~table.excused]
    if not wrong.numel() or not others.numel():
        return
    if wrong.min() > others.max():
        limit = between(float(others.max()), float(wrong.min()))
        yield THRESHOLD, f"where {name} is greater than {limit}", each >= wrong.min()
    elif wrong.max() < others.min():
        limit = between(float(wrong.max()), float(others.min()))
        yield THRESHOLD, f"where {name} is less than {limit}", each <= wrong.max()


def _bands(table: ElementTable, name: str, each: Tensor) -> Iterator[Candidate]:
    """Yield conditions of an interval, or of its complement."""
    wrong, others = each[table.wrong], each[~table.wrong & ~table.excused]
    if not wrong.numel() or not others.numel():
        return
    for words, ours, rest in (("between", wrong, others), ("not between", others, wrong)):
        low, high = float(ours.min()), float(ours.max())
        below, above = rest[rest < low], rest[rest > high]
        if len(below) + len(above) < len(rest) or not len(below) or not len(above):
            continue
        ends = between(float(below.max()), low), between(high, float(above.min()))
        inside = (each >= low) & (each <= high)
        chosen = inside if words == "between" else ~inside
        yield BAND, f"where {name} is {words} {ends[0]} and {ends[1]}", chosen


def between(low: float, high: float) -> str:
    """Format the simplest number from `low` to `high`, with `about` where it has many digits.

    Example:
        >>> between(0.98, 1.04), between(-0.2, 0.3), between(0.7312, 0.7341), between(-math.inf, -2.5)
        ('1', '0', 'about 0.733', '-3')
    """
    if low <= 0 <= high:
        return "0"
    if low == high:
        return f"{low:g}"
    low = high - 1 if math.isinf(low) else low
    high = low + 1 if math.isinf(high) else high
    for digits in (0, 1, 2):
        step = 10.0**-digits
        first = math.ceil(low / step - 1e-9) * step
        if first <= high + 1e-12:
            return f"{round(first, digits):g}"
    middle = (low + high) / 2
    return f"{ABOUT} {middle:.3g}"


Source = tuple[str, str]
"""Name of the values in a message, and their alignment with the elements."""


def values_beside(pair: Observation) -> dict[Source, Tensor]:
    """Return tensors that align with each element of a pair, by name; the input's own first.

    A tensor of fewer dimensions aligns with the last ones, as in broadcasting, or with the first ones. An
    integer tensor that may hold indices gives the number of occurrences of each index, and of its own values.
    A number stands beside every element.
    """
    shape, own = pair.expected.shape, f"`{pair.argument}`"
    named = {f"`{label}`": value for label, value in pair.inputs.items() if isinstance(value, Tensor)}
    named = {**({own: named[own]} if own in named else {}), **named}
    named |= {f"the result `{label}`": value for label, value in pair.results.items()}
    alone = len(pair.grads) == 1
    for label, value in pair.given.items():
        named["the grad_output" if alone else f"the grad_output of `{label}`"] = value
    found: dict[Source, Tensor] = {}
    for name, value in named.items():
        for how, aligned in _aligned(value.detach().cpu(), shape):
            found[name, how] = aligned
        if value.dtype in WHOLE and value.numel():
            for how, times in _times(value.cpu(), shape):
                found[f"an index in {name}", how] = times
            for how, times in _aligned(_own_times(value.cpu()), shape):
                found[f"its value in {name}", f"times {how}"] = times
    for label, value in pair.inputs.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[f"`{label}`", "number"] = torch.full(shape, float(value), dtype=torch.float64)
    return found


def _aligned(value: Tensor, shape: torch.Size) -> Iterator[tuple[str, Tensor]]:
    plain = value if value.dtype == torch.bool else in_double(value)
    if value.dim() <= len(shape):
        with suppress(RuntimeError):  # it does not broadcast
            yield "", plain.expand(shape)
    if 0 < value.dim() < len(shape) and value.shape == shape[: value.dim()]:
        yield "first", plain.reshape(*value.shape, *[1] * (len(shape) - value.dim())).expand(shape)


def _times(value: Tensor, shape: torch.Size) -> Iterator[tuple[str, Tensor]]:
    """Count the occurrences of each index of a dimension in a tensor of indices, or in a row of it."""
    for dim, size in enumerate(shape):
        if int(value.min()) < -size or int(value.max()) >= size:
            continue
        index = value.long() % size
        counts = torch.bincount(index.flatten(), minlength=size).to(torch.float64)
        yield f"times along {dim}", counts.reshape(-1, *[1] * (len(shape) - dim - 1)).expand(shape)
        if 1 < value.dim() == len(shape) and shape == (*value.shape[:dim], size, *value.shape[dim + 1 :]):
            ones = torch.ones(value.shape, dtype=torch.float64)
            yield f"times within {dim}", torch.zeros(shape, dtype=torch.float64).scatter_add(dim, index, ones)


def marks(pair: Observation) -> dict[str, Tensor]:
    """Return truth values of each element that depend on other elements: the largest of a row, ties."""
    found: dict[str, Tensor] = {}
    shape = pair.expected.shape
    for (name, how), aligned in values_beside(pair).items():
        if how or aligned.dtype == torch.bool or aligned.is_complex() or not aligned.numel() or not shape:
            continue
        for which, extreme in EXTREMES.items():
            found[f"where {name} is {which}"] = aligned == extreme(aligned)
        found[f"where {name} occurs more than once"] = _own_times(aligned) > 1
        for dim in range(len(shape)) if len(shape) > 1 else ():
            along = f"along dimension {dim}"
            for which, extreme in EXTREMES.items():
                found[f"where {name} is {which} {along}"] = aligned == extreme(aligned, dim, keepdim=True)
            if aligned.numel() <= 4096 and max(shape) <= 128:
                same = (aligned.unsqueeze(dim) == aligned.unsqueeze(dim + 1)).sum(dim + 1)
                found[f"where {name} occurs more than once {along}"] = same > 1
    return found


EXTREMES = {"largest": torch.amax, "smallest": torch.amin}


def _own_times(values: Tensor) -> Tensor:
    """Count how often each value occurs."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    times: Tensor = counts[inverse]
    return times
