"""Conditions on the numbers beside each element that tell the wrong elements from the right ones.

A condition is evidence where chance would hardly make it fit: the wrong elements are some of many,
and the more conditions are tried, the more ways of choosing them there must be. With n elements of which k
are wrong there are C(n, k), which a condition's bits must not exceed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from opsmith.checking.diagnosis.hypothesis import Pair
from opsmith.checking.numerics.compare import peak, wide

PLAIN, THRESHOLD, BAND = 10.0, 16.0, 22.0
"""Bits that a condition takes: without a number of its own, with one, with two."""

SLIPS = 0.02
"""Share of the elements of a condition that may happen to be right."""

TINY = 1e-3
"""Of the largest element: where the right one is smaller, what is wrong there does not show."""

CONSTANTS = 8
ABOUT = "about"
RELATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "is": torch.eq,
    "is less than": torch.lt,
    "is greater than": torch.gt,
    "is at most": torch.le,
    "is at least": torch.ge,
    "is not": torch.ne,
}


@dataclass(frozen=True)
class Condition:
    """A condition that the evidence bears out.

    Args:
        words: As in `where `x` is less than 0`.
        chosen: The elements for which it holds, of all pairs, one pair after the other.
    """

    words: str
    chosen: Tensor


@dataclass(frozen=True)
class Table:
    """The elements of all pairs, one after the other.

    Args:
        wrong: Which are wrong.
        excused: Which say nothing where they are not wrong.
        columns: Numbers beside each.
        marks: Truth values beside each.
    """

    wrong: Tensor
    excused: Tensor
    columns: dict[Source, Tensor]
    marks: dict[str, Tensor]

    @classmethod
    def of(cls, pairs: Sequence[Pair], wrong: Callable[[Pair], Tensor]) -> Table:
        """The table of some pairs, with what is known beside the elements of each of them."""
        every = [sources(pair) for pair in pairs]
        known = [name for name in every[0] if all(name in each for each in every)]
        columns = {
            name: torch.cat([_column(each[name]) for each in every])
            for name in known
            if len({each[name].dtype for each in every}) == 1
        }
        counts = [pair.right.numel() for pair in pairs]
        plain = [numbers(pair) for pair in pairs]
        for name in plain[0]:
            values = [torch.full((count,), each[name]) for count, each in zip(counts, plain, strict=True)]
            columns[name] = torch.cat(values).to(torch.float64)
        marked = [marks(pair) for pair in pairs]
        found = {
            words: torch.cat([each[words].flatten() for each in marked])
            for words in marked[0]
            if all(words in each for each in marked)
        }
        masks = [wrong(pair).flatten() for pair in pairs]
        small = [silent(pair, wrong(pair)).flatten() for pair in pairs]
        return cls(torch.cat(masks), torch.cat(small), columns, found)

    @property
    def bits(self) -> float:
        """How many ways there are to choose so many elements, in bits."""
        telling = self.wrong | ~self.excused
        return chances(int(telling.sum()), int(self.wrong.sum()))

    def fits(self, chosen: Tensor) -> bool:
        """Whether a condition holds for the wrong elements and for no other that says something."""
        if bool((self.wrong & ~chosen).any()):
            return False
        extra = int((chosen & ~self.wrong & ~self.excused).sum())
        outside = int((~chosen & ~self.excused).sum())
        return outside > 0 and extra <= SLIPS * int(chosen.sum())


def silent(pair: Pair, wrong: Tensor) -> Tensor:
    """Elements in which the fault does not show: the right one is hardly anything, and so is what came.

    Where the fault makes something of nothing, as a mask that is too wide does, each element says something.
    """
    size = pair.right.abs()
    small = size <= TINY * peak(pair.right)
    return torch.zeros_like(small) if bool((wrong & (size <= pair.rounding)).any()) else small


def chances(many: int, chosen: int) -> float:
    """The bits of one choice of so many among many."""
    if not 0 < chosen < many:
        return 0.0
    ways = math.lgamma(many + 1) - math.lgamma(chosen + 1) - math.lgamma(many - chosen + 1)
    return ways / math.log(2)


def _column(lying: Tensor) -> Tensor:
    return lying.flatten()


def conditions(table: Table) -> Iterator[Condition]:
    """Conditions that fit a table, the plainest first."""
    for bits, words, chosen in _candidates(table):
        if table.bits >= bits and table.fits(chosen):
            yield Condition(words, chosen)


Candidate = tuple[float, str, Tensor]


def _candidates(table: Table) -> Iterator[Candidate]:
    real = {source: each for source, each in table.columns.items() if each.dtype == torch.float64}
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
    plain = {source: each for source, each in real.items() if not source[1].startswith("times")}
    beside = {source: each for source, each in plain.items() if source[1] != "number"}
    for (name, _), each in list(beside.items())[:1]:
        yield from _against(name, each, "0", torch.zeros_like(each))
        yield from _constants(name, each)
        for one in (*_thresholds(table, name, each), *_thresholds(table, f"the size of {name}", each.abs())):
            if ABOUT not in one[1]:
                yield one
    for (name, _), each in list(beside.items())[1:]:
        yield from _against(name, each, "0", torch.zeros_like(each))
    # What is said of the inputs alone is plainer than what is said of results and of what comes in.
    given = {source: each for source, each in plain.items() if source[0].startswith("`")}
    for some in (given, plain):
        for ((first, how), mine), ((other, kind), theirs) in combinations(some.items(), 2):
            if how == "number":
                continue
            yield from _against(first, mine, other, theirs)
            if kind == "number":
                yield from _against(f"the size of {first}", mine.abs(), other, theirs)
                yield from _against(first, mine, f"minus {other}", -theirs)
        if some is given:
            yield from ((PLAIN, words, chosen) for words, chosen in table.marks.items())
            yield from _differing(table, given)
    for (name, _), each in beside.items():
        yield from _constants(name, each)
    for (name, _), each in beside.items():
        yield from _thresholds(table, name, each)
        yield from _thresholds(table, f"the size of {name}", each.abs())
    for (name, _), each in table.columns.items():
        if each.is_complex():
            yield from _thresholds(table, f"the size of {name}", each.abs())
    for (name, _), each in beside.items():
        yield from _bands(table, name, each)


def _differing(table: Table, given: dict[Source, Tensor]) -> Iterator[Candidate]:
    """Thresholds of how far two inputs are apart."""
    for ((first, how), mine), ((other, kind), theirs) in combinations(given.items(), 2):
        if "number" not in (how, kind):
            name = f"the difference of {first} and {other}"
            yield from _thresholds(table, name, mine - theirs)
            yield from _thresholds(table, f"the size of {name}", (mine - theirs).abs())
            yield from _bands(table, name, mine - theirs)


def _constants(name: str, each: Tensor) -> Iterator[Candidate]:
    distinct, counts = each.unique(return_counts=True)
    for value in distinct[counts > 1][:CONSTANTS].tolist():
        yield PLAIN, f"where {name} is {value:g}", each == value
    whole = each == each.round()
    yield PLAIN, f"where {name} is a whole number", whole
    yield PLAIN, f"where {name} is not a whole number", ~whole


def _against(one: str, mine: Tensor, other: str, theirs: Tensor) -> Iterator[Candidate]:
    for words, relation in RELATIONS.items():
        yield PLAIN, f"where {one} {words} {other}", relation(mine, theirs)


def _thresholds(table: Table, name: str, each: Tensor) -> Iterator[Candidate]:
    """Above or below a number, which lies between the wrong elements and the others."""
    wrong, others = each[table.wrong], each[~table.wrong & ~table.excused]
    if not wrong.numel() or not others.numel():
        return
    if wrong.min() > others.max():
        limit = between(float(others.max()), float(wrong.min()))
        yield THRESHOLD, f"where {name} is greater than {limit}", each >= wrong.min()
    elif wrong.max() < others.min():
        limit = between(float(wrong.max()), float(others.min()))
        yield THRESHOLD, f"where {name} is less than {limit}", each <= wrong.max()


def _bands(table: Table, name: str, each: Tensor) -> Iterator[Candidate]:
    """Between two numbers, or outside of them."""
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
    """The plainest number from `low` to `high`, in words; `about` it where none of few digits is near.

    Example:
        >>> between(0.98, 1.04), between(-0.2, 0.3), between(0.7312, 0.7341)
        ('1', '0', 'about 0.733')
    """
    if low <= 0 <= high:
        return "0"
    for digits in (0, 1, 2):
        step = 10.0**-digits
        first = math.ceil(low / step - 1e-9) * step
        if first <= high + 1e-12:
            return f"{round(first, digits):g}"
    middle = (low + high) / 2
    return f"{ABOUT} {middle:.3g}"


Source = tuple[str, str]
"""What a message calls the numbers, and how they lie beside the elements."""


def sources(pair: Pair) -> dict[Source, Tensor]:
    """Tensors beside each element of a pair, by what they are; the input's own first.

    A tensor of fewer dimensions lies along the last ones, as broadcasting has it, or along the first ones. An
    integer tensor that may be of indices says of each of them how often it occurs.
    """
    seen, shape = pair.observation, pair.right.shape
    named: dict[str, Tensor] = {}
    own = seen.inputs.get(seen.about or "")
    if isinstance(own, Tensor):
        named[f"`{seen.about}`"] = own
    named |= {
        f"`{label}`": value
        for label, value in seen.inputs.items()
        if isinstance(value, Tensor) and label != seen.about
    }
    named |= {f"the result `{label}`": value for label, value in seen.results.items()}
    alone = len(seen.grads) == 1
    for label, value in seen.grads.items():
        if value is not None:
            named["what comes in" if alone else f"what comes in for `{label}`"] = value
    found: dict[Source, Tensor] = {}
    for name, value in named.items():
        for how, lying in _lying(value.detach().cpu(), shape):
            found[name, how] = lying
        for how, times in _times(value, shape):
            found[f"an index in {name}", how] = times
    return found


def _lying(value: Tensor, shape: torch.Size) -> Iterator[tuple[str, Tensor]]:
    plain = value if value.dtype == torch.bool else wide(value)
    if value.dim() <= len(shape):
        with suppress(RuntimeError):  # it lies otherwise
            yield "", plain.expand(shape)
    if 0 < value.dim() < len(shape) and value.shape == shape[: value.dim()]:
        yield "first", plain.reshape(*value.shape, *[1] * (len(shape) - value.dim())).expand(shape)


def _times(value: Tensor, shape: torch.Size) -> Iterator[tuple[str, Tensor]]:
    """How often each index of a dimension occurs in a tensor of indices."""
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool or not value.numel():
        return
    for dim, size in enumerate(shape):
        low, high = int(value.min()), int(value.max())
        if low < -size or high >= size:
            continue
        counts = torch.bincount(value.detach().cpu().flatten().long() % size, minlength=size)
        lying = counts.to(torch.float64).reshape(-1, *[1] * (len(shape) - dim - 1))
        yield f"times along {dim}", lying.expand(shape)


def marks(pair: Pair) -> dict[str, Tensor]:
    """Truth values beside each element, which its own number does not tell: the largest of a row, ties."""
    found: dict[str, Tensor] = {}
    shape = pair.right.shape
    for (name, how), lying in sources(pair).items():
        if how or lying.dtype == torch.bool or lying.is_complex() or not lying.numel() or not shape:
            continue
        found[f"where {name} is largest"] = lying == lying.max()
        found[f"where {name} is smallest"] = lying == lying.min()
        found[f"where {name} occurs more than once"] = _repeated(lying.flatten()).reshape(shape)
        for dim in range(len(shape)) if len(shape) > 1 else ():
            found[f"where {name} is largest along dimension {dim}"] = lying == lying.amax(dim, keepdim=True)
            found[f"where {name} is smallest along dimension {dim}"] = lying == lying.amin(dim, keepdim=True)
            same = (lying.unsqueeze(dim) == lying.unsqueeze(dim + 1)).sum(dim + 1) if _small(lying) else None
            if same is not None:
                found[f"where {name} occurs more than once along dimension {dim}"] = same > 1
    return found


def _small(tensor: Tensor) -> bool:
    return tensor.numel() <= 4096 and max(tensor.shape) <= 128


def _repeated(values: Tensor) -> Tensor:
    _, places, counts = values.unique(return_inverse=True, return_counts=True)
    repeated: Tensor = counts[places] > 1
    return repeated


def numbers(pair: Pair) -> dict[Source, float]:
    """Plain numbers among the arguments."""
    return {
        (f"`{label}`", "number"): float(value)
        for label, value in pair.observation.inputs.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
