"""Detect errors that are confined to some indices, or to elements for which a condition is true.

A condition is evidence only if it is unlikely to fit by chance. There are C(n, k) ways to choose k wrong
elements of n. The more conditions are tried, the larger this number must be: its logarithm must be at least
the bits of the condition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, islice, product
from typing import Generic, TypeVar

import torch
from torch import Tensor

from opsmith.checking.diagnosis.detectors.scale import SHOWN, shown_factor
from opsmith.checking.diagnosis.observation import (
    COMPARISONS,
    Detection,
    Evidence,
    Observation,
    Source,
    along,
    multiple,
    times,
    values_beside,
)
from opsmith.core.cached_property import cached_property
from opsmith.judging.compare import all_close, largest_magnitude


def region(evidence: Evidence) -> Iterator[Detection]:
    """Detect wrong elements by their indices or by a condition, and describe their values."""
    right = any(bool((~pair.wrong & (pair.expected != 0)).any()) for pair in evidence.pairs)
    if not right or not bool(evidence.first.wrong.any()) or not evidence.first.expected.dim():
        return
    description = describe_elements(evidence, lambda pair: pair.wrong)
    if description is not None:
        reason = f"it is wrong {description}, and nowhere else{inside(evidence)}"
        yield Detection("region", reason, {"region": description})


def inside(evidence: Evidence) -> str:
    """Describe the values of the wrong elements; empty if there is no simple description."""
    actual, right = (
        torch.cat([getattr(pair, side)[pair.wrong] for pair in evidence.pairs])
        for side in ("got", "expected")
    )
    slack, factor = float(evidence.first.slack.max()), multiple(right, actual)
    if not bool(actual.isfinite().all()):
        return ""
    if not bool(actual.any()):
        return "; it is zero there"
    if factor is not None and len(actual) > 1 and all_close(actual, times(factor, right), slack):
        return f"; it is {shown_factor(factor)} times the right value there"
    return "" if bool(right.any()) else "; the right value is zero there"


MOST_WORDS, WIDEST = 2, 80
"""Maximum number of equally good descriptions in a message, and their maximum length."""

Mask = Callable[[Observation], Tensor]
"""Mask of the elements of a pair."""


def describe_elements(evidence: Evidence, mask: Mask) -> str | None:
    """Describe the elements of a mask in a way that every pair confirms; None if there is no description.

    The description is a rule of their indices that is true at other sizes, a condition, or a list of indices.
    """
    pairs, others = [*evidence.pairs], [*evidence.other_sizes]
    here, everywhere = (ElementTable.of(each, mask) for each in (pairs, pairs + others))
    union = torch.stack([mask(pair) for pair in pairs]).any(0)
    if not evidence.fresh and here.bits < PLAIN:
        return None
    listed = None
    if here.fits(union.flatten().repeat(len(pairs))):
        *rules, listed = element_rules(union)
        known = (each.words for each in rules if everywhere.fits(everywhere.by_shape(each.at)))
        fitting = [*islice(known, MOST_WORDS)]
        if fitting:
            return " or ".join(fitting) if sum(map(len, fitting)) < WIDEST else fitting[0]
    condition = next(conditions(ElementTable.of([*pairs, *evidence.more, *others], mask)), None)
    return condition or (listed.words if listed is not None else None)


WIDTHS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Usual sizes of vectors and blocks."""

STRIDES = range(2, 9)

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Rule(Generic[T, R]):
    """Indices along one dimension, at every size; or a mask of elements, at every shape.

    Args:
        words: Description, such as `in its last row`; for indices, `{}` is replaced by the counted item.
        at: Returns the indices at a size, or the mask of a shape.
    """

    words: str
    at: Callable[[T], R]


IndexRule = Rule[int, range]
ElementRule = Rule[torch.Size, Tensor]


def element_rules(mask: Tensor) -> Iterator[ElementRule]:
    """Yield descriptions of a set of elements, from simple to complex; the last lists the elements.

    Example:
        >>> import torch
        >>> mask = torch.zeros(3, 4, dtype=torch.bool)
        >>> mask[2] = True
        >>> next(element_rules(mask)).words
        'in its last row'
    """
    if int(mask.sum()) == 1 and mask.dim() > 1:
        index = mask.nonzero()[0].tolist()
        named = {dim: IndexRule("", _sliced(at, at + 1)) for dim, at in enumerate(index)}
        yield ElementRule(f"at {index}", partial(_box, named=named))
    yield from _boxes(mask)
    yield from _diagonals(mask)
    several = mask.dim() > 1 and int(mask.sum()) > 1
    for each in index_rules(_listed(mask.flatten()), mask.numel()) if several else ():
        yield ElementRule(f"in {each.words.format('element')}, in memory order", partial(_flat, each=each))
    indices = mask.nonzero().tolist()
    if len(indices) <= SHOWN:
        shown = f"at {', '.join(map(str, indices))}"
    else:
        shown = f"at the same {len(indices)} of {mask.numel()} elements on every input"
    yield ElementRule(shown, lambda _: mask)


def index_rules(found: list[int], size: int) -> Iterator[IndexRule]:
    """Yield descriptions of indices along a dimension, from simple to complex."""
    if not found or len(found) == size:
        return
    low, high = found[0], found[-1]
    rules = [("the last {}", _sliced(-1, None)), ("the first {}", _sliced(1))]
    if len(found) == 1 and 0 < low < size - 1:
        rules.append((f"{{}} {low}", _sliced(low, low + 1)))
    rules += [
        ("all but the first {}", _sliced(1, None)),
        ("all but the last {}", _sliced(-1)),
        ("the first and the last {}", lambda n: range(0, n, max(n - 1, 1))),
        ("every {} but the first and the last", _sliced(1, -1)),
    ]
    for width in WIDTHS:
        words = f"every {{}} beyond the last multiple of {width}, from {size // width * width} on"
        rules.append((words, partial(_tail, width=width)))
    if len(found) > 1:
        rules += [
            (f"the last {size - low} {{}}s", _sliced(low - size, None)),
            (f"every {{}} from {low} on", _sliced(low, None)),
            (f"every {{}} up to {high}", _sliced(high + 1)),
            (f"every {{}} from {low} to {high}", _sliced(low, high + 1)),
        ]
    for stride in STRIDES if len(found) > 2 else ():
        nth = {2: "2nd", 3: "3rd"}.get(stride, f"{stride}th")
        rules.append((f"every {nth} {{}}, from {low % stride} on", _sliced(low % stride, None, stride)))
    yield from (IndexRule(words, at) for words, at in rules if [*at(size)] == found)


def _sliced(*bounds: int | None) -> Callable[[int], range]:
    return lambda n: range(n)[slice(*bounds)]


def _tail(n: int, width: int) -> range:
    return range(n // width * width, n)


def _listed(mask: Tensor) -> list[int]:
    return [int(at) for at in mask.nonzero().flatten()]


def _boxes(mask: Tensor) -> Iterator[ElementRule]:
    """Yield products of index rules, one for each dimension, that equal the mask."""
    shape = mask.shape
    sides = [_side(mask, dim) for dim in range(mask.dim())]
    if not mask.dim() or int(mask.sum()) != torch.Size(len(side) for side in sides).numel():
        return
    limited = [dim for dim, side in enumerate(sides) if len(side) < shape[dim]]
    choices = [list(index_rules(sides[dim], shape[dim])) for dim in limited]
    for chosen in product(*choices):
        named = dict(zip(limited, chosen, strict=True))
        if int(mask.sum()) == 1 and any(each.words.startswith("{}") for each in chosen) and mask.dim() > 1:
            continue  # a single index has been described before
        words = " and ".join(_position_words(each.words, dim, mask.dim()) for dim, each in named.items())
        yield ElementRule(f"in {words}", partial(_box, named=named))


def _side(mask: Tensor, dim: int) -> list[int]:
    others = [other for other in range(mask.dim()) if other != dim]
    return _listed(mask.amax(others) if others else mask)


def _position_words(words: str, dim: int, dims: int) -> str:
    """Format the description of indices of one dimension."""
    if dims == 1:
        return words.format("element")
    if dims == 2:
        text = words.format("row" if dim == 0 else "column")
        return text.replace("the ", "its ", 1) if text.startswith(("the last", "the first")) else text
    return f"{words.format('index')} of dimension {dim}".replace("indexs", "indices")


def _box(shape: torch.Size, named: dict[int, IndexRule]) -> Tensor:
    mask = torch.ones(shape, dtype=torch.bool)
    for dim, each in named.items():
        mask &= along(mask_of(each.at(shape[dim]), shape[dim]), dim, len(shape))
    return mask


def mask_of(indices: range, size: int) -> Tensor:
    """Return the mask of indices along a dimension.

    Example:
        >>> mask_of(range(1, 2), 3)
        tensor([False,  True, False])
    """
    mask = torch.zeros(size, dtype=torch.bool)
    mask[[*indices]] = True
    return mask


def _diagonals(mask: Tensor) -> Iterator[ElementRule]:
    for first, second in combinations(range(mask.dim()), 2):
        for relation, words in COMPARISONS.items():
            of = "" if mask.dim() == 2 else f" of dimensions {first} and {second}"
            rule = partial(_related, first=first, second=second, relation=relation)
            if torch.equal(rule(mask.shape), mask):
                yield ElementRule(words[2] + of, rule)


def _related(
    shape: torch.Size, first: int, second: int, relation: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    at = [along(torch.arange(shape[dim]), dim, len(shape)) for dim in (first, second)]
    return relation(*at).expand(shape)


def _flat(shape: torch.Size, each: IndexRule) -> Tensor:
    return mask_of(each.at(shape.numel()), shape.numel()).reshape(shape)


PLAIN, THRESHOLD, BAND = 10.0, 16.0, 22.0
"""Bits of a condition: without a threshold, with one threshold, with two."""

SLIPS = 0.02
"""Maximum share of the elements of a condition that may be right by chance."""

TINY = 1e-3
"""Size, relative to the largest element, below which a fault cannot be seen."""

CONSTANTS = 8
"""Maximum number of distinct values for which conditions of equality are made."""
ABOUT = "about"


@dataclass(frozen=True)
class ElementTable:
    """The elements of all pairs, one pair after another, with the values aligned with them.

    Args:
        wrong: Mask of the wrong elements.
        excused: Mask of the elements that are not evidence if they are right.
        pairs: The pairs.
    """

    wrong: Tensor
    excused: Tensor
    pairs: Sequence[Observation]

    @classmethod
    def of(cls, pairs: Sequence[Observation], wrong: Callable[[Observation], Tensor]) -> ElementTable:
        """Make the table of some pairs."""
        masks = [wrong(pair).flatten() for pair in pairs]
        excused = [negligible(pair, wrong(pair)).flatten() for pair in pairs]
        return cls(torch.cat(masks), torch.cat(excused), pairs)

    def by_shape(self, at: Callable[[torch.Size], Tensor]) -> Tensor:
        """Return a mask of all elements, made from a mask of each shape."""
        return torch.cat([at(pair.expected.shape).flatten() for pair in self.pairs])

    @cached_property
    def columns(self) -> dict[Source, Tensor]:
        """Numbers aligned with each element, by their source."""
        beside = [values_beside(pair) for pair in self.pairs]
        return {
            source: torch.cat([each[source].flatten() for each in beside])
            for source in beside[0]
            if all(source in each for each in beside) and len({each[source].dtype for each in beside}) == 1
        }

    @property
    def bits(self) -> float:
        """Number of ways to choose so many elements, as a logarithm in bits."""
        counted = self.wrong | ~self.excused
        return chances(int(counted.sum()), int(self.wrong.sum()))

    def fits(self, chosen: Tensor) -> bool:
        """Return True if a condition is true for the wrong elements, and false for all other evidence."""
        if bool((self.wrong & ~chosen).any()):
            return False
        extra = int((chosen & ~self.wrong & ~self.excused).sum())
        outside = int((~chosen & ~self.excused).sum())
        return outside > 0 and extra <= SLIPS * int(chosen.sum())


def negligible(pair: Observation, wrong: Tensor) -> Tensor:
    """Mark the elements in which a fault cannot be seen, since both tensors are tiny there.

    If the fault makes zeros nonzero, like a mask that is too wide, every element is evidence.
    """
    size = pair.expected.abs()
    small = size <= TINY * largest_magnitude(pair.expected)
    return torch.zeros_like(small) if bool((wrong & (size <= pair.rounding)).any()) else small


def chances(many: int, chosen: int) -> float:
    """Compute the bits of a choice of some elements among many."""
    if not 0 < chosen < many:
        return 0.0
    log_count = math.lgamma(many + 1) - math.lgamma(chosen + 1) - math.lgamma(many - chosen + 1)
    return log_count / math.log(2)


def conditions(table: ElementTable) -> Iterator[str]:
    """Yield the conditions that fit a table, from simple to complex."""
    for bits, words, chosen in _candidates(table):
        if table.bits >= bits and table.fits(chosen):
            yield words


Candidate = tuple[float, str, Tensor]
"""Bits of a condition, its text, and the mask of the elements for which it is true, for all pairs in
order."""


def _candidates(table: ElementTable) -> Iterator[Candidate]:
    for (name, how), each in table.columns.items():
        if each.dtype == torch.bool:
            yield from ((PLAIN, f"where {name} is {truth}", each == truth) for truth in (True, False))
        elif how.startswith("times"):
            yield PLAIN, f"where {name} occurs more than once", each > 1
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
    yield from _of_two(plain)
    apart = [
        (f"the difference of {first} and {other}", first_values - other_values)
        for ((first, how), first_values), ((other, kind), other_values) in combinations(given.items(), 2)
        if "number" not in (how, kind)
    ]
    for make in (_constants, partial(_thresholds, table), partial(_bounds, table, ends=2)):
        for name, each in apart + beside:
            yield from make(name, each)


def _of_two(columns: Mapping[Source, Tensor]) -> Iterator[Candidate]:
    """Yield comparisons of numbers aligned with each element, with each other and with a number argument."""
    for ((first, how), first_values), ((other, kind), other_values) in combinations(columns.items(), 2):
        if how != "number":
            yield from _against(first, first_values, other, other_values)
            if kind == "number":
                yield from _against(f"the size of {first}", first_values.abs(), other, other_values)
                yield from _against(first, first_values, f"minus {other}", -other_values)


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
    """Yield the bound that separates the wrong from the right elements, or an interval with two bounds."""
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
    """Format the simplest number from `low` to `high`, with `about` if it has many digits.

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
