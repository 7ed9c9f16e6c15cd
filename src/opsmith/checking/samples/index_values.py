"""Values of tensors that choose: indices of every structure, negative ones, and masks with empty rows.

The samples say what a tensor may hold. A permutation stays one. What is sorted stays so if it begins with 0,
as offsets do. Lengths stay as they are. The reference says if an index may be negative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import differentiated
from opsmith.checking.exceptions import Overlooking
from opsmith.checking.run import Run
from opsmith.checking.samples.domain import are_same, asked, rules_of
from opsmith.checking.samples.sample import Sample, places_of
from opsmith.checking.samples.variation_kinds import Variation, varied
from opsmith.checking.subject import Subject
from opsmith.core.cached_property import cached_property
from opsmith.core.generate_like import WHOLE
from opsmith.core.schema import Argument


def index_values(subject: Subject, argument: Argument) -> Iterator[tuple[Any, tuple[Variation, ...]]]:
    """Yield other values of an integer tensor that no sample shows, each with a variation for each sample."""
    places = places_of(subject.samples, argument.name)
    given = [_Index(subject, *place) for place in places if _may_index(place[0].flat[place[1]])]
    rules = [rule for rule in rules_of(subject) if rule.relation.follows]
    linked = {label for rule in rules for label in (rule.source, rule.target)}
    if not given or argument.name in linked or argument.kind.sequence:
        return
    if all(each.is_permutation for each in given) or all(each.is_lengths for each in given):
        return
    reading = [each for each in given if each.reads_last()]
    if not any(each.repeats for each in given):
        yield "repeated", _varied(given, "repeated indices", _Index.repeated, repeats=True)
        yield "equal", _varied(reading, "the last index everywhere", _Index.everywhere, repeats=True)
    begin_with_0 = any(each.value.dim() == 1 and int(each.value[0]) == 0 for each in given)
    if all(each.is_sorted for each in given) and not begin_with_0 and not any(each.repeats for each in given):
        yield "reversed", _varied(given, "the indices in another order", lambda each: each.value.flip(-1))
    if not any(each.is_sorted for each in given):
        yield "rising", _varied(reading, "rising indices from 0 to the last", _Index.rising)
        yield "falling", _varied(reading, "falling indices", lambda each: each.rising().flip(-1))
        yield "permutation", _varied(reading, "a permutation", _Index.permutation)
    if not any(each.bound is None or each.largest == each.bound - 1 for each in given):
        yield "last", _varied(reading, "the last index", _Index.with_last)
    taken = [each for each in reading if each.takes_negative()]
    yield "negative", _varied(taken, "a negative index", _Index.with_negative)
    counts = [each for each in given if each not in reading and int(each.value.min()) >= 0]
    if not any(int(each.value.min()) == 0 for each in given):
        yield "zero", _varied(counts, "a zero", lambda each: each.value.masked_fill(each.is_largest, 0))
    # A number that is a size is a length: an index is smaller.
    lengths = [each for each in counts if each.largest in each.sizes_beside]
    distinct = not any(each.repeats for each in given)
    yield "full", _varied(lengths, "full lengths", _Index.full, repeats=distinct)


def mask_values(subject: Subject, argument: Argument) -> Iterator[tuple[Any, tuple[Variation, ...]]]:
    """Yield masks with an empty row, with no element and with all, each with a variation for each sample."""
    places = [
        (sample, argnum)
        for sample, argnum in places_of(subject.samples, argument.name)
        if is_mask(sample.flat[argnum])
    ]
    for words, change in MASKS.items():
        yield (
            words,
            tuple(
                made
                for sample, argnum in places
                for made in varied(
                    subject,
                    sample,
                    f"{words} in `{sample.labels[argnum]}`",
                    {argnum: change(sample.flat[argnum])},
                    fresh_numbers=True,
                    silent=True,
                    given="undeclared",
                )
            ),
        )


def is_mask(value: Any) -> bool:
    """Return True for a boolean tensor with rows."""
    return isinstance(value, Tensor) and value.dtype == torch.bool and value.dim() > 0 and value.numel() > 1


def _empty_row(mask: Tensor) -> Tensor:
    rows = mask.clone(memory_format=torch.contiguous_format)
    rows.view(-1, mask.shape[-1])[-1] = False
    return rows


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "an empty row": _empty_row,
    "nothing": torch.zeros_like,
    "everything": torch.ones_like,
}
"""Masks that random numbers seldom make, by their description."""


def _may_index(value: Any) -> bool:
    whole = isinstance(value, Tensor) and value.dtype in WHOLE and value.dtype != torch.uint8
    return whole and value.dim() > 0 and value.numel() > 1


def _varied(
    given: Sequence[_Index], words: str, change: Callable[[_Index], Tensor], *, repeats: bool = False
) -> tuple[Variation, ...]:
    return tuple(
        made
        for each in given
        for made in varied(
            each.subject,
            each.sample,
            f"{words} in `{each.sample.labels[each.argnum]}`",
            {each.argnum: change(each)},
            fresh_numbers=True,
            silent=True,
            given="undeclared",
            repeats=repeats,
        )
    )


@dataclass(frozen=True)
class _Index:
    """An integer tensor of a sample that may index.

    Args:
        subject: The subject of the check.
        sample: The sample.
        argnum: Position of the tensor.
    """

    subject: Subject
    sample: Sample
    argnum: int

    @cached_property
    def value(self) -> Tensor:
        """The tensor."""
        found: Tensor = self.sample.flat[self.argnum]
        return found

    @property
    def is_sorted(self) -> bool:
        return bool((self.value.diff(dim=-1) >= 0).all())

    @property
    def repeats(self) -> bool:
        return len(self.value.unique()) < self.value.numel()

    @property
    def is_permutation(self) -> bool:
        counted = torch.arange(self.value.shape[-1], dtype=self.value.dtype)
        return len(counted) > 2 and bool((self.value.cpu().sort(-1).values == counted).all())

    @property
    def is_lengths(self) -> bool:
        return int(self.value.sum()) in self.sizes_beside

    @cached_property
    def sizes_beside(self) -> list[int]:
        """The sizes of the other tensors of the sample."""
        others = (each for at, each in enumerate(self.sample.flat) if at != self.argnum)
        return [size for each in others if isinstance(each, Tensor) for size in each.shape]

    @cached_property
    def largest(self) -> int:
        return int(self.value.max())

    @cached_property
    def bound(self) -> int | None:
        """The smallest size beside the tensor above all its values, so that no index is too large."""
        above = [size for size in self.sizes_beside if size > self.largest]
        return min(above) if above and int(self.value.min()) >= 0 else None

    def repeated(self) -> Tensor:
        """Repeat every second index; a sorted tensor stays sorted, with its first and its last one."""
        made = self.value.clone(memory_format=torch.contiguous_format)
        flat = made.view(-1)
        step = slice(1, len(flat) - 1 if len(flat) > 2 and self.is_sorted else len(flat), 2)
        flat[step] = flat[0 : len(flat) - 1 : 2][: len(flat[step])]
        return made

    def everywhere(self) -> Tensor:
        """Put the last index into every place."""
        return torch.full_like(self.value, (self.bound or 1) - 1)

    def full(self) -> Tensor:
        """Put the largest one into every place."""
        return torch.full_like(self.value, self.largest)

    def rising(self) -> Tensor:
        """Put sorted indices there, from 0 to the last, which repeat only where there are too few."""
        steps = torch.linspace(0, (self.bound or 1) - 1, self.value.shape[-1], dtype=torch.float64)
        return steps.floor().to(self.value.dtype).to(self.value.device).expand_as(self.value).clone()

    def permutation(self) -> Tensor:
        """Put every index there once, which may be more than there are places."""
        each = torch.arange(self.bound or 1, dtype=self.value.dtype, device=self.value.device).roll(1)
        return each.expand(*self.value.shape[:-1], len(each)).clone()

    @property
    def is_largest(self) -> Tensor:
        """Mask of the places of the largest one."""
        return self.value == self.largest

    def with_last(self) -> Tensor:
        """Replace the largest index by the last one, where there is a bound."""
        return self.value.masked_fill(self.is_largest, (self.bound or 0) - 1)

    def with_negative(self) -> Tensor:
        """Replace the largest index by -1."""
        return self.value.masked_fill(self.is_largest, -1)

    def reads_last(self) -> bool:
        """Return True if the last index reads the last place of a tensor, which a lower index does not.

        So the integers are indices: numbers that are computed with, as a mask, do not choose what is read.
        """
        if self.bound is None or self.bound < 2:
            return False
        lower = self.value.masked_fill(self.value == self.bound - 1, 0)
        for read in self.sample.inexact:
            for dim, size in enumerate(self.sample.flat[read].shape):
                if size == self.bound:
                    changed = self.sample.flat[read].detach().clone()
                    changed.select(dim, size - 1).mul_(-0.75).add_(0.375)
                    alike = [
                        are_same(self._asked(each), self._asked(each, {read: changed}))
                        for each in (lower, self.with_last())
                    ]
                    if alike == [True, False]:
                        return True
        return False

    def _asked(self, value: Tensor, changed: dict[int, Tensor] | None = None) -> list[Tensor] | None:
        return asked(self.subject, self.sample, {self.argnum: value, **(changed or {})})

    def takes_negative(self) -> bool:
        """Return True if -1 is the last index to the reference, and to the backward of a call."""
        negative = self.with_negative()
        if not are_same(self._asked(self.with_last()), self._asked(negative)):
            return False
        # Without it torch takes a negative index of a sparse gradient, and damages the process.
        with Overlooking(), torch.sparse.check_sparse_tensor_invariants():
            flat = self.sample.at()
            flat[self.argnum] = negative
            argnums = differentiated(self.subject, self.sample).argnums
            Run(self.subject, self.sample, by=argnums).call(flat).backward()
            return True
        return False
