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
from functools import partial
from itertools import combinations

import torch
from torch import Tensor

from opsmith.checking.diagnosis.evidence import COMPARISONS, along
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

Source = tuple[str, str]
"""Name of the values in a message, and their alignment with the elements."""

OF_ENTRIES = ("times", "times first")
"""Alignments of counts of the entries of a tensor, not of the indices of a dimension."""


@dataclass(frozen=True)
class ElementTable:
    """The elements of all pairs, one pair after the other, with the values beside them.

    Args:
        wrong: Mask of the wrong elements.
        excused: Mask of the elements that are not evidence if they are right.
        columns: Mapping[Source, Tensor] beside each element.
    """

    wrong: Tensor
    excused: Tensor
    columns: dict[Source, Tensor]

    @classmethod
    def of(cls, pairs: Sequence[Observation], wrong: Callable[[Observation], Tensor]) -> ElementTable:
        """Build the table of some pairs."""
        masks = [wrong(pair) for pair in pairs]
        small = [negligible(pair, mask).flatten() for pair, mask in zip(pairs, masks, strict=True)]
        beside = [values_beside(pair) for pair in pairs]
        columns = {
            source: torch.cat([each[source].flatten() for each in beside])
            for source in beside[0]
            if all(source in each for each in beside) and len({each[source].dtype for each in beside}) == 1
        }
        return cls(torch.cat([mask.flatten() for mask in masks]), torch.cat(small), columns)

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
            yield from ((PLAIN, f"where {name} is {truth}", each == truth) for truth in (True, False))
        elif how.startswith("times"):
            yield PLAIN, f"where {name} occurs more than once", each > 1
        elif each.is_complex():
            for part, values in (
                ("real part", each.real),
                ("imaginary part", each.imag),
                ("size", each.abs()),
            ):
                yield from _against(f"the {part} of {name}", values, "0", torch.zeros_like(values))
                yield from _bounds(table, f"the {part} of {name}", values, ends=1)
    plain = {
        source: each
        for source, each in table.columns.items()
        if each.dtype == torch.float64 and not source[1].startswith("times")
    }
    beside = [(name, each) for (name, how), each in plain.items() if how != "number"]
    for place, (name, each) in enumerate(beside):
        yield from _against(name, each, "0", torch.zeros_like(each))
        if not place:
            yield from _constants(name, each)
            yield from (one for one in _thresholds(table, name, each) if ABOUT not in one[1])
    # Conditions on inputs alone are simpler than those on results and grad_outputs.
    given = {source: each for source, each in plain.items() if source[0].startswith("`")}
    yield from _of_two(given)
    yield from _differing(table, given)
    yield from _of_two(plain)
    for make in (_constants, partial(_thresholds, table), partial(_bounds, table, ends=2)):
        for name, each in beside:
            yield from make(name, each)


def _of_two(columns: Mapping[Source, Tensor]) -> Iterator[Candidate]:
    """Yield comparisons of numbers beside each element, and of those with a number argument."""
    for ((first, how), first_values), ((other, kind), other_values) in combinations(columns.items(), 2):
        if how != "number":
            yield from _against(first, first_values, other, other_values)
            if kind == "number":
                yield from _against(f"the size of {first}", first_values.abs(), other, other_values)
                yield from _against(first, first_values, f"minus {other}", -other_values)


def _differing(table: ElementTable, given: Mapping[Source, Tensor]) -> Iterator[Candidate]:
    """Yield thresholds of the difference of two inputs."""
    for ((first, how), first_values), ((other, kind), other_values) in combinations(given.items(), 2):
        if "number" not in (how, kind):
            name = f"the difference of {first} and {other}"
            yield from _thresholds(table, name, first_values - other_values)
            yield from _bounds(table, name, first_values - other_values, ends=2)


def _constants(name: str, each: Tensor) -> Iterator[Candidate]:
    distinct, counts = each.unique(return_counts=True)
    for value in distinct[counts > 1][:CONSTANTS].tolist():
        yield PLAIN, f"where {name} is {value:g}", each == value


def _against(one: str, first_values: Tensor, other: str, other_values: Tensor) -> Iterator[Candidate]:
    for relation, words in COMPARISONS.items():
        yield PLAIN, f"where {one} {words[0]} {other}", relation(first_values, other_values)


def _thresholds(table: ElementTable, name: str, each: Tensor) -> Iterator[Candidate]:
    yield from _bounds(table, name, each, ends=1)
    yield from _bounds(table, f"the size of {name}", each.abs(), ends=1)


def _bounds(table: ElementTable, name: str, each: Tensor, ends: int) -> Iterator[Candidate]:
    """Yield the bound that separates the wrong elements from the others, or an interval with two ends."""
    wrong, others = each[table.wrong], each[~table.wrong & ~table.excused]
    if not wrong.numel() or not others.numel():
        return
    for inside, ours, rest in ((True, wrong, others), (False, others, wrong)):
        low, high = float(ours.min()), float(ours.max())
        below, above = rest[rest < low], rest[rest > high]
        if len(below) + len(above) < len(rest) or (len(below) > 0) + (len(above) > 0) != ends:
            continue
        first = between(float(below.max()), low) if len(below) else ""
        last = between(high, float(above.min())) if len(above) else ""
        if first and last:
            chosen = (each >= low) & (each <= high)
            words = f"{'' if inside else 'not '}between {first} and {last}"
            yield BAND, f"where {name} is {words}", chosen if inside else ~chosen
        elif inside:
            words = f"greater than {first}" if first else f"less than {last}"
            yield THRESHOLD, f"where {name} is {words}", each >= low if first else each <= high


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


def values_beside(pair: Observation) -> dict[Source, Tensor]:
    """Return tensors that align with each element of a pair, by name; the input's own first.

    A tensor of fewer dimensions aligns with the last ones, as in broadcasting, or with the first ones. An
    integer tensor that may hold indices gives the number of occurrences of each index, and of its own values.
    A number stands beside every element.
    """
    shape, found = pair.expected.shape, dict[Source, Tensor]()
    own_first = sorted(pair.inputs, key=lambda label: label != pair.argument)
    named = {
        f"`{label}`": pair.inputs[label] for label in own_first if isinstance(pair.inputs[label], Tensor)
    }
    named |= {f"the result `{label}`": value for label, value in pair.results.items()}
    alone = len(pair.grads) == 1
    named |= {f"the grad_output{'' if alone else f' of `{name}`'}": grad for name, grad in pair.given.items()}
    for name, value in named.items():
        for how, aligned in _aligned(value.detach().cpu(), shape):
            found[name, how] = aligned
        if value.dtype in WHOLE and value.numel():
            for how, times in _times(value.cpu(), shape):
                found[f"an index in {name}", how] = times
            for how, times in _aligned(_own_times(value.cpu()), shape):
                found[f"its value in {name}", OF_ENTRIES[how == "first"]] = times
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
        yield f"times along {dim}", along(counts, dim, len(shape)).expand(shape)
        if 1 < value.dim() == len(shape) and shape == (*value.shape[:dim], size, *value.shape[dim + 1 :]):
            ones = torch.ones(value.shape, dtype=torch.float64)
            yield f"times within {dim}", torch.zeros(shape, dtype=torch.float64).scatter_add(dim, index, ones)


def _own_times(values: Tensor) -> Tensor:
    """Count how often each value occurs."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    times: Tensor = counts[inverse]
    return times
