"""Values of integer tensors that may index: repeated, in another order, the last index, and negative ones.

The samples say what a tensor may hold. A permutation stays one. What is sorted stays so if it begins with 0,
as offsets do. Lengths stay as they are. The reference says if an index may be negative.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import differentiated, live_call
from opsmith.checking.exceptions import Overlooking
from opsmith.checking.samples.linked_values import links_of
from opsmith.checking.samples.sample import Sample, places_of
from opsmith.checking.samples.variation_kinds import Variation
from opsmith.checking.subject import Subject
from opsmith.core.call_arguments import tensors_in
from opsmith.core.generate_like import WHOLE
from opsmith.core.schema import Argument


def index_values(subject: Subject, argument: Argument) -> Iterator[tuple[Any, tuple[Variation, ...]]]:
    """Yield other values of an integer tensor that no sample shows, each with a variation for each sample."""
    places = places_of(subject.samples, argument.name)
    given = [(sample, argnum) for sample, argnum in places if _may_index(sample.flat[argnum])]
    tensors = [sample.flat[argnum] for sample, argnum in given]
    linked = {label for link in links_of(subject.samples) for label in (link.source, link.target)}
    if not tensors or argument.name in linked or argument.kind.sequence:
        return
    if all(map(_is_permutation, tensors)) or all(_is_lengths(*place) for place in given):
        return
    if not any(_repeats(tensor) for tensor in tensors):
        yield "repeated", _varied(given, "repeated indices", _repeated, repeats=True)
    if all(map(_is_sorted, tensors)) and not any(_repeats(t) or _begins_with_0(t) for t in tensors):
        yield "reversed", _varied(given, "the indices in another order", lambda sample, index: index.flip(-1))
    reading = [place for place in given if _reads_last(subject, *place)]
    if not any(_reaches_end(*place) for place in given):
        yield "last", _varied(reading, "the last index", _with_last)
    taken = [place for place in reading if _takes_negative(subject, *place)]
    yield "negative", _varied(taken, "a negative index", _with_negative)


def _may_index(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dtype in WHOLE
        and value.dtype != torch.uint8
        and value.dim() > 0
        and value.numel() > 1
    )


def _varied(
    given: Sequence[tuple[Sample, int]], words: str, change: Any, *, repeats: bool = False
) -> tuple[Variation, ...]:
    found = []
    for sample, argnum in given:
        made = change(sample, sample.flat[argnum])
        if made is not None:
            flat = sample.with_value(argnum, made)
            what = f"{words} in `{sample.labels[argnum]}`"
            found.append(
                Variation(sample, what, flat, True, silent=True, given="undeclared", repeats=repeats)
            )
    return tuple(found)


def _is_sorted(index: Tensor) -> bool:
    return bool((index.diff(dim=-1) >= 0).all())


def _begins_with_0(index: Tensor) -> bool:
    return index.dim() == 1 and int(index[0]) == 0


def _repeats(index: Tensor) -> bool:
    return len(index.unique()) < index.numel()


def _is_permutation(index: Tensor) -> bool:
    counted = torch.arange(index.shape[-1], dtype=index.dtype)
    return index.shape[-1] > 2 and bool((index.cpu().sort(-1).values == counted).all())


def _is_lengths(sample: Sample, argnum: int) -> bool:
    return int(sample.flat[argnum].sum()) in _sizes_beside(sample, argnum)


def _sizes_beside(sample: Sample, argnum: int) -> list[int]:
    """Return the sizes of the other tensors of a sample."""
    others = (value for at, value in enumerate(sample.flat) if at != argnum and isinstance(value, Tensor))
    return [size for value in others for size in value.shape]


def _repeated(sample: Sample, index: Tensor) -> Tensor:
    """Repeat every second index; a sorted tensor stays sorted, with its first and its last one."""
    made = index.clone(memory_format=torch.contiguous_format)
    flat = made.view(-1)
    step = slice(1, len(flat) - 1 if len(flat) > 2 and _is_sorted(index) else len(flat), 2)
    flat[step] = flat[0 : len(flat) - 1 : 2][: len(flat[step])]
    return made


def _bound(sample: Sample, index: Tensor) -> int | None:
    """Return the smallest size beside the tensor above all its values, so that no index is too large."""
    argnum = next(at for at, value in enumerate(sample.flat) if value is index)
    above = [size for size in _sizes_beside(sample, argnum) if size > int(index.max())]
    return min(above) if above and int(index.min()) >= 0 else None


def _reaches_end(sample: Sample, argnum: int) -> bool:
    bound = _bound(sample, sample.flat[argnum])
    return bound is None or int(sample.flat[argnum].max()) == bound - 1


def _with_last(sample: Sample, index: Tensor) -> Tensor | None:
    """Replace the largest index by the last one."""
    bound = _bound(sample, index)
    return None if bound is None else torch.where(index == index.max(), bound - 1, index).to(index.dtype)


def _with_negative(sample: Sample, index: Tensor) -> Tensor:
    """Replace the largest index by -1."""
    return torch.where(index == index.max(), -1, index)


def _reads_last(subject: Subject, sample: Sample, argnum: int) -> bool:
    """Return True if the last index reads the last place of a tensor, which a lower index does not.

    So the integers are indices: numbers that are computed with, as a mask, do not choose what is read.
    """
    index = sample.flat[argnum]
    last, bound = _with_last(sample, index), _bound(sample, index)
    if last is None or bound is None or bound < 2:
        return False
    lower = torch.where(index == bound - 1, 0, index)
    for read in sample.inexact:
        for dim, size in enumerate(sample.flat[read].shape):
            if size != bound:
                continue
            changed = sample.flat[read].detach().clone()
            changed.select(dim, size - 1).mul_(-0.75).add_(0.375)
            alike = [
                _same(
                    _results(subject, sample, {argnum: each}),
                    _results(subject, sample, {argnum: each, read: changed}),
                )
                for each in (lower, last)
            ]
            if alike == [True, False]:
                return True
    return False


def _takes_negative(subject: Subject, sample: Sample, argnum: int) -> bool:
    """Return True if -1 is the last index to the reference, and to the backward of a call."""
    index = sample.flat[argnum]
    negative = _with_negative(sample, index)
    if not _same(
        _results(subject, sample, {argnum: _with_last(sample, index)}),
        _results(subject, sample, {argnum: negative}),
    ):
        return False
    # Without it torch takes a negative index of a sparse gradient, and damages the process.
    with Overlooking(), torch.sparse.check_sparse_tensor_invariants():
        flat = _flat(sample, {argnum: negative})
        live_call(subject, sample, flat, differentiated(subject, sample).argnums).backward()
        return True
    return False


def _flat(sample: Sample, changed: Mapping[int, Any]) -> list[Any]:
    """Return the arguments with some changed."""
    flat = sample.at()
    for argnum, value in changed.items():
        flat[argnum] = value.clone()
    return flat


def _results(subject: Subject, sample: Sample, changed: Mapping[int, Any]) -> list[Tensor] | None:
    """Return the results of the reference with some arguments changed; None where it raises."""
    with Overlooking(), torch.no_grad():
        results = subject.reference(sample, _flat(sample, changed))
        return tensors_in(list(results))
    return None


def _same(one: list[Tensor] | None, other: list[Tensor] | None) -> bool:
    return (
        one is not None and other is not None and len(one) == len(other) and all(map(torch.equal, one, other))
    )
