"""It is right but for some indices, or where a condition holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice, product

import torch
from torch import Tensor

from opsmith.checking.diagnosis.conditions import PLAIN, Table, chances, conditions, silent
from opsmith.checking.diagnosis.detectors.scale import shown_factor
from opsmith.checking.diagnosis.hypothesis import Found, Pair, Seen


def region(seen: Seen) -> Iterator[Found]:
    """The wrong elements of every input by their indices or by a condition, and what stands there."""
    if not seen.first.same_shape or seen.first.right.dim() == 0:
        return
    wrong = seen.first.wrong
    if not bool(wrong.any()) or not any(bool((~pair.wrong & (pair.right != 0)).any()) for pair in seen.pairs):
        return
    place = where_it_is(seen, lambda pair: pair.wrong)
    if place is None:
        return
    what = inside(seen)
    reason = f"it is wrong {place}, and nowhere else" + (f"; {what}" if what else "")
    yield Found("region", reason, {"region": place})


def inside(seen: Seen) -> str:
    """What stands in the wrong elements; empty if it is nothing that has a name."""
    mine = torch.cat([pair.mine[pair.wrong] for pair in seen.pairs])
    right = torch.cat([pair.right[pair.wrong] for pair in seen.pairs])
    if not bool(mine.isfinite().all()):
        return ""
    slack = float(seen.first.slack.max())
    if not bool(mine.any()):
        return "it is zero there"
    weight = float((right.abs() ** 2).sum())
    if weight and len(mine) > 1:
        factor = complex((right.conj() * mine).sum() / weight)
        if bool(((mine - right * (factor if right.is_complex() else factor.real)).abs() <= slack).all()):
            return f"it is {shown_factor(factor)} times the right one there"
    if len(mine) > 1 and bool(((mine - mine[0]).abs() <= slack).all()):
        return f"it is {mine[0].item():.6g} there"
    if not bool(right.any()):
        return "the right one is zero there"
    return ""


MOST = 2
"""Descriptions that a message lists, where nothing tells them apart."""

Mask = Callable[[Pair], Tensor]


def where_it_is(seen: Seen, mask: Mask) -> str | None:
    """Words for the elements of a mask, borne out by every pair; None if there are none."""
    return by_index(seen, mask) or by_condition(seen, mask)


def by_index(seen: Seen, mask: Mask) -> str | None:
    """The elements by their indices: the same on every fresh input, and by the same rule at other sizes."""
    masks = [mask(pair) for pair in seen.pairs]
    union = torch.stack(masks).any(0)
    for pair, each in zip(seen.pairs, masks, strict=True):
        if bool((union & ~each & ~silent(pair, each)).any()):
            return None
    total = union.numel()
    if not seen.fresh and chances(total, int(union.sum())) < PLAIN:
        return None
    there = [(pair, mask(pair)) for pair in seen.elsewhere if pair.same_shape]
    kept: list[str] = []
    fallback = None
    for place in places(union):
        if fallback is None or place.words.startswith("at"):
            fallback = place.words
        if place.words.startswith("at") and kept:
            continue  # a list says less than a rule
        if all(_predicts(place.mask(pair.right.shape), found, pair) for pair, found in there):
            kept.append(place.words)
    if kept:
        return " or ".join(kept[:MOST]) if len(kept[0]) + len(kept[-1]) < 80 else kept[0]
    return fallback


def _predicts(predicted: Tensor, found: Tensor, pair: Pair) -> bool:
    extra = predicted & ~found & ~silent(pair, found)
    return not bool((found & ~predicted).any()) and not bool(extra.any())


def by_condition(seen: Seen, mask: Mask) -> str | None:
    """The elements by a condition on the numbers beside them."""
    pairs = [*seen.pairs, *seen.more, *(pair for pair in seen.elsewhere if pair.same_shape)]
    table = Table.of(pairs, mask)
    for found in conditions(table):
        return found.words
    return None


WIDTHS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Of how many elements vectors and blocks usually are."""

STRIDES = range(2, 9)
LISTED = 6
"""Indices that a message lists, at most."""

COMBINATIONS = 200

Indices = frozenset[int]


@dataclass(frozen=True)
class Along:
    """A set of indices along one dimension, at every size.

    Args:
        words: Which they are; `{}` stands for what is counted: row, column, element.
        at: The set at a size.
    """

    words: str
    at: Callable[[int], Indices]


@dataclass(frozen=True)
class Place:
    """A set of elements, at every shape.

    Args:
        words: Where they are, as in `in its last row`.
        mask: The elements of a shape.
    """

    words: str
    mask: Callable[[torch.Size], Tensor]


def places(mask: Tensor) -> Iterator[Place]:
    """Descriptions of a set of elements, the simplest first; the last one lists them.

    Example:
        >>> import torch
        >>> mask = torch.zeros(3, 4, dtype=torch.bool)
        >>> mask[2] = True
        >>> next(places(mask)).words
        'in its last row'
    """
    if int(mask.sum()) == 1 and mask.dim() > 1:
        index = mask.nonzero()[0].tolist()
        yield Place(f"at {index}", partial(_single, index=index))
    yield from _boxes(mask)
    yield from _diagonals(mask)
    for words, inside in (("at its border", False), ("away from its border", True)):
        bordered = partial(_border, inside=inside)
        if mask.dim() > 1 and torch.equal(bordered(mask.shape), mask):
            yield Place(words, bordered)
    for each in along(_set(mask.flatten()), mask.numel()) if mask.dim() > 1 and int(mask.sum()) > 1 else ():
        yield Place(f"in {each.words.format('element')}, in memory order", partial(_flat, each=each))
    indices = mask.nonzero().tolist()
    if len(indices) <= LISTED:
        shown = f"at {', '.join(map(str, indices))}"
    else:
        shown = f"at the same {len(indices)} of {mask.numel()} elements each time"
    yield Place(shown, lambda shape: mask if shape == mask.shape else torch.zeros(shape, dtype=torch.bool))


def _single(shape: torch.Size, index: list[int]) -> Tensor:
    mask = torch.zeros(shape, dtype=torch.bool)
    if len(index) == len(shape) and all(at < size for at, size in zip(index, shape, strict=True)):
        mask[tuple(index)] = True
    return mask


def along(found: Indices, size: int) -> Iterator[Along]:
    """Descriptions of a set of indices along a dimension, the simplest first."""
    for each in _rules(found, size):
        if each.at(size) == found:
            yield each


def _rules(found: Indices, size: int) -> Iterator[Along]:
    if not found or len(found) == size:
        return
    low, high = min(found), max(found)
    yield Along("the last {}", lambda n: frozenset({n - 1} if n else ()))
    yield Along("the first {}", lambda n: frozenset({0} if n else ()))
    if len(found) == 1 and 0 < low < size - 1:
        yield Along(f"{{}} {low}", lambda n: frozenset({low} if low < n else ()))
    yield Along("all but the first {}", lambda n: frozenset(range(1, n)))
    yield Along("all but the last {}", lambda n: frozenset(range(n - 1)))
    yield Along("the first and the last {}", lambda n: frozenset({0, n - 1}) if n else frozenset())
    yield Along("every {} but the first and the last", lambda n: frozenset(range(1, n - 1)))
    for width in WIDTHS:
        words = f"every {{}} beyond the last multiple of {width}, from {size // width * width} on"
        yield Along(words, partial(_tail, width=width))
    if len(found) == 1:
        return
    yield Along(f"the last {size - low} {{}}s", lambda n: frozenset(range(max(n - (size - low), 0), n)))
    yield Along(f"every {{}} from {low} on", lambda n: frozenset(range(low, n)))
    yield Along(f"every {{}} up to {high}", lambda n: frozenset(range(min(high + 1, n))))
    yield Along(f"every {{}} from {low} to {high}", lambda n: frozenset(range(low, min(high + 1, n))))
    yield Along("every {} in the second half", lambda n: frozenset(range(n - n // 2, n)))
    yield Along("every {} in the first half", lambda n: frozenset(range(n // 2)))
    for stride in STRIDES if len(found) > 2 else ():
        start = low % stride
        nth = {2: "2nd", 3: "3rd"}.get(stride, f"{stride}th")
        words = f"every {nth} {{}}, from {start} on"
        yield Along(words, partial(_strided, start=start, stride=stride))


def _tail(n: int, width: int) -> Indices:
    return frozenset(range(n // width * width, n))


def _strided(n: int, start: int, stride: int) -> Indices:
    return frozenset(range(start, n, stride))


def _set(mask: Tensor) -> Indices:
    return frozenset(mask.nonzero().flatten().tolist())


def _boxes(mask: Tensor) -> Iterator[Place]:
    """The mask as what some indices of each dimension span."""
    shape = mask.shape
    sides = [_side(mask, dim) for dim in range(mask.dim())]
    if not mask.dim() or int(mask.sum()) != torch.Size(len(side) for side in sides).numel():
        return
    limited = [dim for dim, side in enumerate(sides) if len(side) < shape[dim]]
    choices = [list(along(sides[dim], shape[dim])) for dim in limited]
    for chosen in islice(product(*choices), COMBINATIONS):
        named = dict(zip(limited, chosen, strict=True))
        if int(mask.sum()) == 1 and any(each.words.startswith("{}") for each in chosen) and mask.dim() > 1:
            continue  # its index has been told
        words = " and ".join(_said(each.words, dim, mask.dim()) for dim, each in named.items())
        yield Place(f"in {words}", partial(_box, named=named))


def _side(mask: Tensor, dim: int) -> Indices:
    others = [other for other in range(mask.dim()) if other != dim]
    return _set(mask.amax(others) if others else mask)


def _said(words: str, dim: int, dims: int) -> str:
    """The words for indices of one dimension of so many."""
    if dims == 1:
        return words.format("element")
    if dims == 2:
        said = words.format("row" if dim == 0 else "column")
        return said.replace("the ", "its ", 1) if said.startswith(("the last", "the first")) else said
    return f"{words.format('index')} of dimension {dim}".replace("indexs", "indices")


def _box(shape: torch.Size, named: dict[int, Along]) -> Tensor:
    mask = torch.ones(shape, dtype=torch.bool)
    for dim, each in named.items():
        if dim >= len(shape):
            return torch.zeros(shape, dtype=torch.bool)
        kept = torch.zeros(shape[dim], dtype=torch.bool)
        kept[sorted(each.at(shape[dim]))] = True
        mask &= kept.reshape(-1, *[1] * (len(shape) - dim - 1))
    return mask


RELATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "on the diagonal": torch.eq,
    "off the diagonal": torch.ne,
    "above the diagonal": torch.lt,
    "below the diagonal": torch.gt,
    "on and above the diagonal": torch.le,
    "on and below the diagonal": torch.ge,
}


def _diagonals(mask: Tensor) -> Iterator[Place]:
    for first in range(mask.dim()):
        for second in range(first + 1, mask.dim()):
            for words, relation in RELATIONS.items():
                of = "" if mask.dim() == 2 else f" of dimensions {first} and {second}"
                rule = partial(_related, first=first, second=second, relation=relation)
                if torch.equal(rule(mask.shape), mask):
                    yield Place(words + of, rule)


def _related(
    shape: torch.Size, first: int, second: int, relation: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    if second >= len(shape):
        return torch.zeros(shape, dtype=torch.bool)
    at = [torch.arange(shape[dim]).reshape(-1, *[1] * (len(shape) - dim - 1)) for dim in (first, second)]
    return relation(*at).expand(shape)


def _border(shape: torch.Size, *, inside: bool) -> Tensor:
    inner = torch.ones(shape, dtype=torch.bool)
    for dim, size in enumerate(shape):
        inner.narrow(dim, 0, min(1, size)).fill_(False)
        inner.narrow(dim, max(size - 1, 0), min(1, size)).fill_(False)
    return inner if inside else ~inner


def _flat(shape: torch.Size, each: Along) -> Tensor:
    mask = torch.zeros(shape.numel(), dtype=torch.bool)
    mask[sorted(each.at(shape.numel()))] = True
    return mask.reshape(shape)
