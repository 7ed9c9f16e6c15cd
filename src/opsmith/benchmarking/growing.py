"""Sizes that a benchmark finds itself: a sample, grown as far as its operator lets it grow.

Samples are small, since finite differences are taken on them. The letters of a sample are doubled, one alone
or two together, wherever the reference still takes the call; always those that are smallest, so that no side
is left behind. The reference is asked on `meta` tensors, which costs no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from opsmith.benchmarking.template import Letters, Template, elements
from opsmith.core.shapes import LEADING

MOST = 12
"""Letters that are tried: pairs of more would take long."""


def grown(template: Template, targets: Sequence[int]) -> Iterator[Letters]:
    """Letters for so many elements each, about; nothing where it cannot be told how the sample may grow.

    Args:
        template: The sample; the operator takes it as it is.
        targets: How many elements its tensors shall have together, ascending.

    Example:
        >>> import opsmith.ops
        >>> from opsmith.benchmarking.subject import samples_of_operator
        >>> spec = opsmith.ops.linear.specification
        >>> template = Template.of(spec, samples_of_operator(opsmith.ops.linear, None, 0)[0])
        >>> [dict(each) for each in grown(template, [1000])]
        [{'...': (32,), 'M': 24, 'N': 16}]
    """
    groups = _groups(template)
    letters = dict(template.letters)
    for target in targets:
        while groups and _elements(template, letters) < target:
            group = min(groups, key=lambda each: max(_size(letters, name) for name in each))
            larger = _doubled(letters, group)
            if _fits(template, larger):
                letters = larger
            else:
                groups.remove(group)
        if letters != template.letters and _elements(template, letters) * 2 > target:
            yield dict(letters)


def _groups(template: Template) -> list[tuple[str, ...]]:
    """Letters that may be doubled: alone, or else with one other, best one that makes the result larger.

    An image grows with its result, or with its window: the first is what is meant.
    """
    letters = template.letters
    if not _fits(template, letters):
        return []
    names = [name for name in letters if _size(letters, name)][:MOST]
    alone = [(name,) for name in names if _fits(template, _doubled(letters, (name,)))]
    rest = [name for name in names if (name,) not in alone]
    tried = {pair: _attempt(template, _doubled(letters, pair)) for pair in combinations(rest, 2)}
    results = {pair: size for pair, size in tried.items() if isinstance(size, int)}
    pairs: list[tuple[str, ...]] = []
    for pair in sorted(results, key=lambda each: -results[each]):
        if {name for other in pairs for name in other}.isdisjoint(pair):
            pairs.append(pair)
    return [*alone, *pairs]


def _attempt(template: Template, letters: Letters) -> int | str:
    try:
        values = template.values(letters)
    except ValueError as error:
        return str(error)
    return template.attempt(values)


def _fits(template: Template, letters: Letters) -> bool:
    return isinstance(_attempt(template, letters), int)


def _elements(template: Template, letters: Letters) -> int:
    return elements(template.values(letters))


def _doubled(letters: Letters, group: Sequence[str]) -> Letters:
    larger = dict(letters)
    for name in group:
        size = letters[name]
        larger[name] = (2 * size[0], *size[1:]) if name == LEADING else 2 * size
    return larger


def _size(letters: Letters, name: str) -> int:
    size = letters[name]
    if name == LEADING:
        return int(size[0]) if size else 0
    return size if isinstance(size, int) else 0
