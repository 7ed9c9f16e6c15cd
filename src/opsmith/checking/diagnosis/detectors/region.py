"""Detect errors that are confined to some indices, or to elements where a condition holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations, islice, product
from typing import Generic, TypeVar

import torch
from torch import Tensor

from opsmith.checking.diagnosis.conditions import PLAIN, ElementTable, chances, conditions, negligible
from opsmith.checking.diagnosis.detectors.scale import shown_factor
from opsmith.checking.diagnosis.evidence import COMPARISONS, Detection, Evidence, along, multiple, times
from opsmith.checking.diagnosis.observation import Observation
from opsmith.judging.compare import all_close


def region(evidence: Evidence) -> Iterator[Detection]:
    """Detect wrong elements by their indices or by a condition, and describe their values."""
    if not evidence.first.same_shape or evidence.first.expected.dim() == 0:
        return
    wrong = evidence.first.wrong
    if not bool(wrong.any()) or not any(
        bool((~pair.wrong & (pair.expected != 0)).any()) for pair in evidence.pairs
    ):
        return
    description = describe_elements(evidence, lambda pair: pair.wrong)
    if description is None:
        return
    what = inside(evidence)
    reason = f"it is wrong {description}, and nowhere else" + (f"; {what}" if what else "")
    yield Detection("region", reason, {"region": description})


def inside(evidence: Evidence) -> str:
    """Describe the values of the wrong elements; empty if there is no simple description."""
    actual = torch.cat([pair.got[pair.wrong] for pair in evidence.pairs])
    right = torch.cat([pair.expected[pair.wrong] for pair in evidence.pairs])
    if not bool(actual.isfinite().all()):
        return ""
    slack = float(evidence.first.slack.max())
    if not bool(actual.any()):
        return "it is zero there"
    factor = multiple(right, actual)
    if factor is not None and len(actual) > 1 and all_close(actual, times(factor, right), slack):
        return f"it is {shown_factor(factor)} times the right one there"
    if len(actual) > 1 and all_close(actual, actual[0].expand_as(actual), slack):
        return f"it is {actual[0].item():.6g} there"
    if not bool(right.any()):
        return "the right one is zero there"
    return ""


MOST_WORDS = 2
"""Largest number of equally good descriptions in a message."""

Mask = Callable[[Observation], Tensor]
"""Mask of the elements of a pair."""


def describe_elements(evidence: Evidence, mask: Mask) -> str | None:
    """Describe the elements of a mask, as every pair confirms it; None if there is no description."""
    words, everywhere = by_index(evidence, mask)
    return words if everywhere else by_condition(evidence, mask) or words


def by_index(evidence: Evidence, mask: Mask) -> tuple[str | None, bool]:
    """Describe elements by their indices, as on fresh inputs, and say if the rule holds at other sizes."""
    masks = [mask(pair) for pair in evidence.pairs]
    union = torch.stack(masks).any(0)
    for pair, each in zip(evidence.pairs, masks, strict=True):
        if bool((union & ~each & ~negligible(pair, each)).any()):
            return None, False
    total = union.numel()
    if not evidence.fresh and chances(total, int(union.sum())) < PLAIN:
        return None, False
    at_other_sizes = [(pair, mask(pair)) for pair in evidence.other_sizes]
    fitting: list[str] = []
    fallback = None
    for rule in element_rules(union):
        if fallback is None or rule.words.startswith("at"):
            fallback = rule.words
        if rule.words.startswith("at") and fitting:
            continue  # a rule is better than a list
        if all(_predicts(rule.at(pair.expected.shape), found, pair) for pair, found in at_other_sizes):
            fitting.append(rule.words)
    if fitting:
        short = len(fitting[0]) + len(fitting[-1]) < 80
        return " or ".join(fitting[:MOST_WORDS]) if short else fitting[0], True
    return fallback, False


def _predicts(predicted: Tensor, found: Tensor, pair: Observation) -> bool:
    extra = predicted & ~found & ~negligible(pair, found)
    return not bool((found & ~predicted).any()) and not bool(extra.any())


def by_condition(evidence: Evidence, mask: Mask) -> str | None:
    """Describe elements by a condition on the values beside them."""
    table = ElementTable.of([*evidence.pairs, *evidence.more, *evidence.other_sizes], mask)
    return next(conditions(table), None)


WIDTHS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Usual sizes of vectors and blocks."""

STRIDES = range(2, 9)
LISTED = 6
"""Largest number of indices in a message."""

COMBINATIONS = 200
"""Largest number of combinations of index rules."""

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Rule(Generic[T, R]):
    """Indices along one dimension, at every size; or a mask of elements, at every shape.

    Args:
        words: Description, as in `in its last row`; of indices, `{}` stands for the counted item.
        at: Returns the indices at a size, or the mask of a shape.
    """

    words: str
    at: Callable[[T], R]


IndexRule = Rule[int, range]
ElementRule = Rule[torch.Size, Tensor]


def element_rules(mask: Tensor) -> Iterator[ElementRule]:
    """Yield descriptions of a set of elements, the simplest first; the last one lists them.

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
    if len(indices) <= LISTED:
        shown = f"at {', '.join(map(str, indices))}"
    else:
        shown = f"at the same {len(indices)} of {mask.numel()} elements each time"
    yield ElementRule(
        shown, lambda shape: mask if shape == mask.shape else torch.zeros(shape, dtype=torch.bool)
    )


def index_rules(found: list[int], size: int) -> Iterator[IndexRule]:
    """Yield descriptions of indices along a dimension, the simplest first."""
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
    for chosen in islice(product(*choices), COMBINATIONS):
        named = dict(zip(limited, chosen, strict=True))
        if int(mask.sum()) == 1 and any(each.words.startswith("{}") for each in chosen) and mask.dim() > 1:
            continue  # a single index is described before
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
        if dim >= len(shape):
            return torch.zeros(shape, dtype=torch.bool)
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
    if second >= len(shape):
        return torch.zeros(shape, dtype=torch.bool)
    at = [along(torch.arange(shape[dim]), dim, len(shape)) for dim in (first, second)]
    return relation(*at).expand(shape)


def _flat(shape: torch.Size, each: IndexRule) -> Tensor:
    return mask_of(each.at(shape.numel()), shape.numel()).reshape(shape)
