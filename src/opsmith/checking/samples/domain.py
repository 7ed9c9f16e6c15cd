"""Domain of an operator: relations that are true in every author's sample are kept in derived inputs.

The domain is not declared; only the samples show it. A rule states how two arguments are related, and
restores the relation if a derived input has broken it. The reference also decides which inputs it takes.

Sizes belong together if `shapes=` declares so, or if the samples show so: sizes that are equal in every
sample form a symbol. They are changed together, with the integer arguments that equal them. Too few symbols
make less varied inputs; too many would make invalid inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import Overlooking
from opsmith.checking.samples.forms import FEWEST, Form, forms_of
from opsmith.checking.samples.sample import Sample, SizeLocation, Symbol
from opsmith.checking.subject import Subject, computed_once
from opsmith.core.cached_property import cached_property
from opsmith.core.call_arguments import tensors_in
from opsmith.core.expression import Expression, ExpressionError
from opsmith.core.generate_like import WHOLE, is_symmetric
from opsmith.core.shapes import ANY, Shapes
from opsmith.core.tensors import sequence_like
from opsmith.judging.compare import all_close
from opsmith.judging.tensors import is_inexact

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Relation:
    """A relation that two tensors may have.

    Args:
        restored: Function that returns a pair with the relation in place of a given pair, along a dimension
            of the first tensor; None for a pair that cannot have it.
        is_shown: Returns True if a pair that has the relation does not have it by chance.
        follows: True if the second tensor follows from the first.
        by_size: True if it concerns a size of the first tensor, and is restored if this size changes.
    """

    restored: Callable[[Tensor, Tensor, int], Pair | None]
    is_shown: Callable[[Tensor, Tensor, int], bool]
    follows: bool = False
    by_size: bool = False


def _derived(derive: Callable[[Tensor, int], Tensor]) -> Relation:
    """The relation of a tensor to integers that are computed from it."""

    def restored(source: Tensor, target: Tensor, dim: int) -> Pair | None:
        if target.dtype not in WHOLE or source.dtype == torch.bool or source.is_complex():
            return None
        made = derive(source.detach(), dim).to(target.device, target.dtype)
        return (source, made) if made.shape == target.shape else None

    def is_shown(source: Tensor, target: Tensor, dim: int) -> bool:
        """True if the tensor is long enough, and 0, 1, 2, ... would not lead to the same integers."""
        plain = derive(torch.arange(source.shape[dim]), -1).to(target.device, target.dtype)
        moved = target.movedim(dim, -1)
        return source.shape[dim] >= FEWEST and not torch.equal(moved, plain.expand(moved.shape))

    return Relation(restored, is_shown, follows=True)


def _ordered(low: Tensor, high: Tensor, dim: int) -> Pair | None:
    alike = (low.shape, low.dtype, low.device) == (high.shape, high.dtype, high.device)
    if not alike or not low.is_floating_point():
        return None
    return low.detach().minimum(high.detach()), low.detach().maximum(high.detach())


def _below_size(table: Tensor, index: Tensor, dim: int) -> Pair | None:
    size = table.shape[dim]
    if not index.numel() or not size:
        return table, index
    if index.dtype not in WHOLE or int(index.min()) < 0:
        return None
    return table, index if int(index.max()) < size else index % size


def _ending_at_size(table: Tensor, offsets: Tensor, dim: int) -> Pair | None:
    if offsets.dtype not in WHOLE or offsets.dim() != 1 or len(offsets) < 2 or int(offsets.min()) < 0:
        return None
    made = offsets.clamp(max=table.shape[dim]).sort().values
    made[-1] = table.shape[dim]
    return table, made


def _summing_to_size(order: bool | None, table: Tensor, counts: Tensor, dim: int) -> Pair | None:
    """Counts in the same proportions with the sum `dim`; nonzero counts stay at least 1 if possible.

    Args:
        order: True for falling counts, False for rising ones, None for any.
        table: The tensor.
        counts: The counts.
        dim: The dimension that they sum to.
    """
    size = table.shape[dim]
    if counts.dtype not in WHOLE or counts.dim() != 1 or not len(counts) or int(counts.min()) < 0:
        return None
    made = counts.to(torch.int64)
    if int(made.sum()) != size:
        made = _in_proportion(made, size)
    made = made if order is None else made.sort(descending=order).values
    return table, made.to(counts.dtype)


def _in_proportion(counts: Tensor, total: int) -> Tensor:
    """Counts with a given sum in the same proportions; the largest counts come first."""
    least = (counts > 0).to(counts.dtype) if int((counts > 0).sum()) <= total else torch.zeros_like(counts)
    weights = counts - least if bool((counts > least).any()) else torch.ones_like(counts)
    left = total - int(least.sum())
    made = least + weights * left // weights.sum()
    rest = total - int(made.sum())
    made[counts.sort(descending=True, stable=True).indices[:rest]] += 1
    return made


def _shows_counts(table: Tensor, counts: Tensor, dim: int) -> bool:
    """True for several counts that repeat or fall: distinct rising indices can have any sum."""
    falling = bool((counts.diff() <= 0).all())
    return len(counts) >= FEWEST and (falling or len(counts.unique()) < len(counts))


RELATIONS = (
    Relation(_ordered, lambda low, high, dim: low.numel() >= FEWEST and bool((low < high).all())),
    Relation(_below_size, lambda table, index, dim: index.numel() > 0, by_size=True),
    Relation(_ending_at_size, lambda table, offsets, dim: True, by_size=True),
    *(Relation(partial(_summing_to_size, order), _shows_counts) for order in (None, True, False)),
    _derived(lambda source, dim: source.argsort(dim=dim, stable=True)),
    _derived(lambda source, dim: source.diff(dim=dim)),
)
"""The relations: ordered bounds; indices below a size, offsets that end at a size, counts that sum to a size;
the sorting order of elements (for a permutation, its inverse); and the counts between offsets."""


@dataclass(frozen=True)
class Rule:
    """A relation of two arguments that is true in every sample.

    Args:
        relation: The relation.
        source: Label of the first argument.
        target: Label of the second argument.
        dim: The dimension of the first argument.
        rank: The first argument's number of dimensions.
    """

    relation: Relation
    source: str
    target: str
    dim: int
    rank: int

    def holds(self, values: Mapping[str, Any]) -> bool:
        """True if the arguments have the relation, or if they are not both tensors of these ranks."""
        pair = self._pair(values)
        restored = None if pair is None else self.relation.restored(*pair, self.dim)
        return pair is None or (restored is not None and all(map(torch.equal, pair, restored)))

    def restore(self, given: Mapping[str, Any], changed: dict[str, Any]) -> None:
        """Restore the relation in arguments that were changed."""
        now, had = self._pair(changed), self._pair(given)
        kept = now is not None and had is not None and now[0].shape[self.dim] == had[0].shape[self.dim]
        if now is None or (self.relation.by_size and kept):
            return
        for label, value in zip(
            (self.source, self.target), self.relation.restored(*now, self.dim) or now, strict=True
        ):
            if not torch.equal(changed[label], value):
                changed[label] = value

    def _pair(self, values: Mapping[str, Any]) -> Pair | None:
        source, target = values.get(self.source), values.get(self.target)
        if not isinstance(source, Tensor) or not isinstance(target, Tensor) or source.dim() != self.rank:
            return None
        return source, target


def rules_of(subject: Subject) -> tuple[Rule, ...]:
    """The rules that are true in every author's sample with both arguments, and that at least one shows.

    Example:
        >>> import torch, opsmith
        >>> from opsmith.checking.effort import EFFORTS
        >>> from opsmith.checking.subject_kinds import subject_of
        >>> @opsmith.operator("demo::take")
        ... def take(x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ...     return x[order]
        >>> order = torch.tensor([2, 0, 3, 1])
        >>> call = (torch.ones(4), order, order.argsort())
        >>> rules = rules_of(subject_of(take, [call], 0, EFFORTS["quick"]))
        >>> [rule.target for rule in rules if rule.relation.follows]
        ['inverse']
    """
    samples = [each for each in subject.samples if not each.origin]
    return subject.once("rules", samples[0], partial(_rules_of, samples)) if samples else ()


def _rules_of(samples: Sequence[Sample]) -> tuple[Rule, ...]:
    every = [dict(zip(each.labels, each.flat, strict=True)) for each in samples]
    found: list[Rule] = []
    sources: dict[str, str] = {}

    def line(label: str) -> list[str]:
        """The argument, and the chain of arguments from which it follows."""
        return [label, *(line(sources[label]) if label in sources else ())]

    for rule in (rule for values in every for rule in _shown(values)):
        follows = rule.relation.follows
        # If two arguments are a permutation and its inverse, only the later follows from the other.
        again = rule in found or (follows and rule.target in (*sources, *line(rule.source)))
        if not again and all(map(rule.holds, every)):
            found.append(rule)
            sources |= {rule.target: rule.source} if follows else {}
    steps = {rule: len(line(rule.target)) if rule.relation.follows else 0 for rule in found}
    return tuple(sorted(found, key=lambda rule: (steps[rule], RELATIONS.index(rule.relation))))


def _shown(values: Mapping[str, Any]) -> Iterator[Rule]:
    """The rules that a sample shows."""
    tensors = {label: value for label, value in values.items() if isinstance(value, Tensor)}
    for relation, (source, one), (target, other) in product(RELATIONS, tensors.items(), tensors.items()):
        for dim in range(-1, -one.dim() - 1, -1) if source != target or relation.by_size else ():
            rule = Rule(relation, source, target, dim, one.dim())
            if rule.holds(values) and relation.is_shown(one, other, dim):
                yield rule


def restored(subject: Subject, sample: Sample, flat: Sequence[Any]) -> list[Any]:
    """The flat arguments of an input derived from a sample, with each rule and form restored."""
    given = dict(zip(sample.labels, sample.flat, strict=True))
    changed = dict(zip(sample.labels, flat, strict=True))
    kept: tuple[Rule | Form, ...] = (*rules_of(subject), *forms_of(subject))
    for each in kept:
        each.restore(given, changed)
    return list(changed.values())


def asked(
    subject: Subject, sample: Sample, changed: Mapping[int, Any], *, wide: bool = False
) -> list[Tensor] | None:
    """The results of the reference with some arguments changed; None if it raises.

    Args:
        changed: Changed values, by position.
        wide: True for arguments in float64.
    """
    flat = sample.in_double() if wide else sample.at()
    for argnum, value in changed.items():
        flat[argnum] = value.clone()
    with Overlooking(), torch.no_grad():  # the properties report its exceptions for a sample
        return tensors_in(list(subject.reference(sample, flat)))
    return None


def are_same(one: Sequence[Any] | None, other: Sequence[Any] | None) -> bool:
    """True for tensors of the same numbers; False if a list is None because the reference raised."""
    if one is None or other is None or len(one) != len(other):
        return False
    pairs = zip(one, other, strict=True)
    return all(isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def symmetric_labels(subject: Subject) -> frozenset[str]:
    """The labels of the inputs that are symmetric in every sample, and of which only one triangle is read."""
    every = [
        {
            sample.labels[argnum]
            for argnum in sample.inexact
            if is_symmetric(sample.flat[argnum]) and _reads_one_triangle(subject, sample, argnum)
        }
        for sample in (() if subject.draws else subject.samples)
    ]
    return frozenset(set.intersection(*every) if every else ())


def _reads_one_triangle(subject: Subject, sample: Sample, argnum: int) -> bool:
    """True if one triangle has no influence; a function that raises for asymmetric matrices reads both."""
    matrix = sample.in_double()[argnum]
    whole = asked(subject, sample, {}, wide=True)
    change = 1 + matrix.abs()  # change both triangles of a diagonal matrix, too
    others = (matrix + change.triu(1), matrix + change.tril(-1))
    return any(are_same(whole, asked(subject, sample, {argnum: other}, wide=True)) for other in others)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a sample.

    Args:
        subject: The subject of the check.
        sample: The sample.
        symbols: Sizes that can be changed.
        formulas: Sizes computed from symbols, if the author declared expressions.
    """

    subject: Subject
    sample: Sample
    symbols: tuple[Symbol, ...]
    formulas: Mapping[SizeLocation, Callable[[Mapping[str, int]], int | None]]

    @cached_property
    def varying(self) -> list[str]:
        """The names of sizes that may change: the samples or the author show it, or they are batch-like."""
        return [
            symbol.name
            for symbol in self.symbols
            if symbol.varies or is_batch_like(self.subject, self.sample, symbol)
        ]

    @cached_property
    def by_name(self) -> dict[str, Symbol]:
        """The symbols by their names."""
        return {symbol.name: symbol for symbol in self.symbols}

    def changed(self, to: Mapping[str, int]) -> dict[int, Any] | None:
        """Compute new shapes of tensors, and integers, by position; None if an expression has no value.

        Args:
            to: New sizes of some symbols, by name.
        """
        letters = {**{symbol.name: symbol.size for symbol in self.symbols}, **to}
        sizes: dict[SizeLocation, int | None] = {
            place: size for name, size in to.items() for place in self.by_name[name].locations
        }
        sizes.update({place: formula(letters) for place, formula in self.formulas.items()})
        found: dict[int, Any] = {}
        for place, size in sizes.items():
            value = self.sample.flat[place.argnum]
            form = found.get(place.argnum, value.shape if isinstance(value, Tensor) else value)
            if size is None:
                return None
            several = isinstance(form, list | tuple)
            items = (size if at == place.index else item for at, item in enumerate(form if several else ()))
            found[place.argnum] = sequence_like(form, items) if several else size
        return found


def sizes_of(subject: Subject, sample: Sample) -> Sizes:
    """Return the sizes of a sample, from the declaration or else from the samples."""
    shapes = subject.specification.shapes
    if shapes is None:
        return Sizes(subject, sample, _equal_sizes(subject, sample), {})
    return _declared(subject, sample, shapes)


def _declared(subject: Subject, sample: Sample, shapes: Shapes) -> Sizes:
    locations: dict[str, list[SizeLocation]] = {}
    formulas: dict[SizeLocation, Any] = {}
    letters, _ = shapes.bind(sample.flattening.schema, sample.flattening.pack(sample.flat))
    for argnum, (name, value) in enumerate(zip(sample.names, sample.flat, strict=True)):
        if name in shapes.integers and isinstance(value, int):
            locations.setdefault(name, []).append(SizeLocation(argnum, 0, number=True))
        dims = shapes.arguments.get(name)
        if dims is None or not isinstance(value, Tensor):
            continue
        start = value.dim() - len(dims.sizes)
        for lead in range(start):
            locations.setdefault(f"...[{lead - start}]", []).append(SizeLocation(argnum, lead))
        for index, (size, expression) in enumerate(zip(dims.sizes, dims.expressions, strict=True)):
            if expression is not None:
                formulas[SizeLocation(argnum, start + index)] = _formula(expression)
            elif size != ANY:
                locations.setdefault(size, []).append(SizeLocation(argnum, start + index))
    sizes = sizes_at(sample)
    symbols = tuple(
        Symbol(name, sizes[where[0]], tuple(where), True)
        for name, where in locations.items()
        if name in letters or name.startswith("...")
    )
    return Sizes(subject, sample, symbols, formulas)


def _formula(expression: Expression) -> Callable[[Mapping[str, int]], int | None]:
    def size(letters: Mapping[str, int]) -> int | None:
        try:
            value = expression.value(letters)
        except (ExpressionError, KeyError):  # KeyError: a letter that no argument of this sample has
            return None
        return value if isinstance(value, int) and value >= 0 else None

    return size


def _equal_sizes(subject: Subject, sample: Sample) -> tuple[Symbol, ...]:
    """Make symbols of sizes that are equal in this sample and in all other samples with the same tensors."""
    sizes, samples = sizes_at(sample), [sample, *(each for each in subject.samples if each is not sample)]
    labelled = [{_label(each, place): size for place, size in sizes_at(each).items()} for each in samples]
    known = {place: [each.get(_label(sample, place)) for each in labelled] for place in sizes}
    groups: list[list[SizeLocation]] = []
    for place in sorted(sizes):
        joined = [group for group in groups if any(_together(known, each, place) for each in group)]
        whole = [each for group in joined for each in group]
        groups = [*(group for group in groups if group not in joined), sorted([*whole, place])]
    found: list[Symbol] = []
    for group in sorted(groups):
        places = [place for place in group if not place.number]
        if places:
            sized = [
                (size, each) for place in places for size, each in zip(known[place], samples, strict=True)
            ]
            shown = {size for size, _ in sized if size is not None}
            authored = {size for size, each in sized if size is not None and not each.origin}
            name = f"{sample.labels[places[0].argnum]}.shape[{places[0].index}]"
            divisor = math.gcd(*authored) or 1 if len(authored) > 1 else 1
            found.append(Symbol(name, sizes[places[0]], tuple(group), len(shown) > 1, divisor))
    return tuple(found)


def _together(
    known: Mapping[SizeLocation, Sequence[int | None]], first: SizeLocation, second: SizeLocation
) -> bool:
    """Return True if two sizes are equal in every sample that has both."""
    pairs = {(a, b) for a, b in zip(known[first], known[second], strict=True) if None not in (a, b)}
    # A small integer may equal a size by chance, but not if it changes with the size.
    return all(a == b for a, b in pairs) and (len(pairs) > 1 or not (first.number or second.number))


def sizes_at(sample: Sample) -> dict[SizeLocation, int]:
    """Return every size and every integer of a sample."""
    found: dict[SizeLocation, int] = {}
    for argnum, value in enumerate(sample.flat):
        if isinstance(value, Tensor):
            found.update({SizeLocation(argnum, index): size for index, size in enumerate(value.shape)})
        several = value if isinstance(value, list | tuple) else [value]
        if all(type(item) is int for item in several):
            found.update(
                {SizeLocation(argnum, index, number=True): item for index, item in enumerate(several)}
            )
    return found


def _label(sample: Sample, location: SizeLocation) -> tuple[Any, ...]:
    """Name of a location in every sample that has a tensor of the same rank there."""
    argnum = location.argnum
    return sample.labels[argnum], sample.ranks[argnum], location.index, location.number


def emptied_with(sizes: Sizes, symbol: Symbol) -> dict[str, int] | None:
    """Return the sizes to set to 0 together with a size, as of indices into it; None if this is impossible.

    A reference may take indices into an empty tensor, as `index_add` does; a kernel may refuse them.
    """
    to, sample = {symbol.name: 0}, sizes.sample
    for argnum, value in enumerate(sample.flat):
        if not isinstance(value, Tensor) or value.dtype not in WHOLE or not value.numel():
            continue
        own = [
            each
            for each in sizes.symbols
            if any(place.argnum == argnum and not place.number for place in each.locations)
        ]
        if any(each.name in to for each in own):
            continue
        takes = [
            index <= torch.iinfo(value.dtype).max
            and asked(sizes.subject, sample, {argnum: torch.full_like(value, index)}) is not None
            for index in (symbol.size - 1, symbol.size)
        ]
        if takes != [True, False]:
            continue
        if not own:
            return None
        to[own[0].name] = 0
    return to


def is_batch_like(subject: Subject, sample: Sample, symbol: Symbol) -> bool:
    """Return True if a slice of a dimension gives a slice of the results, so that its size is arbitrary."""
    numbers = any(location.number for location in symbol.locations)
    if symbol.size < 2 or symbol.doubled or numbers or subject.draws:
        return False
    whole, size = asked(subject, sample, {}, wide=True), symbol.size
    for start, length in ((0, size - 1), (size - 1, 1)):
        flat = sample.in_double()
        places = symbol.locations
        slices = {each.argnum: flat[each.argnum].narrow(each.index, start, length) for each in places}
        part = asked(subject, sample, slices, wide=True)
        if whole is None or part is None or len(whole) != len(part):  # the size has a meaning to the operator
            return False
        if not all(_is_part(one, other, size, start, length) for one, other in zip(whole, part, strict=True)):
            return False
    return True


def _is_part(whole: Tensor, part: Tensor, size: int, start: int, length: int) -> bool:
    if whole.dim() != part.dim() or whole.dtype != part.dtype:
        return False
    changed = [at for at, (a, b) in enumerate(zip(whole.shape, part.shape, strict=True)) if a != b]
    if len(changed) != 1 or whole.shape[changed[0]] != size:
        return False
    expected = whole.narrow(changed[0], start, length)
    if not is_inexact(whole):
        return torch.equal(expected, part)
    return all_close(part, expected, 1e-12 + 1e-9 * part.abs())


def broadcast_shapes(subject: Subject, sample: Sample) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield positions of arguments, each with a shape that broadcasts to its own.

    This is only for operators whose results have the broadcast shape of their arguments in every sample,
    since other operators may accept a size of 1 with a different meaning. Only broadcasts that a sample shows
    are used: a dimension of 1 next to a larger dimension (which may also grow to it), fewer dimensions than
    the result, or none.
    """
    found = [_pointwise(subject, each) for each in subject.samples]
    wholes, own = [each for each in found if each is not None], _whole(sample)
    if len(wholes) < len(found) or own is None:
        return
    tensors = [argnum for argnum, value in enumerate(sample.flat) if isinstance(value, Tensor)]
    for argnum in tensors:
        shape = tuple(sample.flat[argnum].shape)
        shown = [
            (value.shape, whole)
            for each, whole in zip(subject.samples, wholes, strict=True)
            for label, value in zip(each.labels, each.flat, strict=True)
            if label == sample.labels[argnum] and isinstance(value, Tensor)
        ]
        several = len({len(form) for form, _ in shown}) > 1
        if several and 0 not in shape and any(len(form) < len(whole) for form, whole in shown):
            yield from ((argnum, shape[dropped:]) for dropped in range(1, len(shape) + 1))
        stretched = any(
            mine == 1 and full > 1
            for form, whole in shown
            for mine, full in zip(reversed(form), reversed(whole), strict=False)
        )
        for at, full in enumerate(own[len(own) - len(shape) :] if 0 not in shape else ()):
            size = full if shape[at] == 1 else 1 if stretched else shape[at]
            if size not in (0, shape[at]):
                yield argnum, (*shape[:at], size, *shape[at + 1 :])
        if several and shape and len(tensors) == 1:
            yield argnum, ()


def _whole(sample: Sample) -> tuple[int, ...] | None:
    """The broadcast shape of all arguments; None if they cannot be broadcast."""
    try:
        return tuple(torch.broadcast_shapes(*(value.shape for value in tensors_in(list(sample.flat)))))
    except RuntimeError:
        return None


@computed_once
def _pointwise(subject: Subject, sample: Sample) -> tuple[int, ...] | None:
    """The broadcast shape of all arguments, if every result has it."""
    whole, results = _whole(sample), asked(subject, sample, {})
    alike = results is not None and all(tuple(each.shape) == whole for each in results)
    return whole if alike else None
