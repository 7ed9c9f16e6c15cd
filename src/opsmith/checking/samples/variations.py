"""More inputs than the author gave: what his samples show may vary, varied.

Every variation is one of his samples with one thing changed, and the operator's own reference decides whether
it is an input at all: one that it raises for, warns of, or has no finite answer to, is listed as rejected and
is no fault.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import refuse_own
from opsmith.checking.property import first_line
from opsmith.checking.samples.batches import all_finite
from opsmith.checking.samples.cases import refuse_unfit_results
from opsmith.checking.samples.empty_inputs import Unserved, unserved
from opsmith.checking.samples.sample import Sample
from opsmith.checking.samples.variation_kinds import KINDS, Change
from opsmith.checking.subject import Subject

MOST_ELEMENTS = 2000
"""No variation has more elements than this, or than the sample that it comes from."""

MOST_RESULTS = 20_000


@dataclass(frozen=True)
class Variations:
    """Inputs that were derived from the author's.

    Args:
        samples: Those that the reference accepts; their positions follow those of the author's samples.
        rejected: Those that it does not, each with what it says.
        unserved: Those without elements that an operator without a reference fails at, and does not refuse.
    """

    samples: tuple[Sample, ...]
    rejected: tuple[str, ...]
    unserved: tuple[Unserved, ...] = ()


def variations(subject: Subject) -> Variations:
    """Derive more inputs from the samples, the same for the same seed.

    They are taken from each kind in turn (sizes, empties, values, ...), until the level of effort is reached.

    Example:
        >>> import opsmith.ops
        >>> from opsmith.checking.effort import EFFORTS
        >>> from opsmith.checking.subject_kinds import subject_of
        >>> print(variations(subject_of(opsmith.ops.exp, None, 0, EFFORTS["quick"])).samples[1])
        sample 6 (x [0, 5]; sample 0 with `x.shape[0]` at 0 where it had 3)
    """
    refuse_unfit_results(subject)
    accepted: list[Sample] = []
    rejected: dict[str, None] = {}
    faults: dict[str, Unserved] = {}
    seen = {form_of(sample) for sample in subject.samples}
    trials = 4 * subject.effort.variations
    for change in _in_turn(subject):
        if len(accepted) == subject.effort.variations or not trials:
            break
        sample = change.sample(len(subject.samples) + len(accepted))
        form = form_of(sample)
        if _too_large(sample, change.of) or (form in seen and not change.fresh_numbers):
            continue
        trials -= 1
        reason = refusal(subject, sample, change)
        if reason is None:
            accepted.append(sample)
            seen.add(form)
        elif isinstance(reason, Unserved):
            faults.setdefault(reason.symbol.name, reason)
        elif not change.silent:
            rejected[f"{change.origin}: {reason}"] = None
    return Variations(tuple(accepted), tuple(rejected), tuple(faults.values()))


def _in_turn(subject: Subject) -> Iterator[Change]:
    """One change of each kind, then the next of each: each kind goes through the samples in turn."""
    kinds = [
        _woven([kind(subject, sample, _generator(subject, at, sample)) for sample in subject.samples])
        for at, kind in enumerate(KINDS)
    ]
    return _woven(kinds)


def _woven(several: Sequence[Iterator[Change]]) -> Iterator[Change]:
    for turn in zip_longest(*several):
        yield from (change for change in turn if change is not None)


def _generator(subject: Subject, kind: int, sample: Sample) -> torch.Generator:
    """Numbers that are the same however many changes of other kinds there are."""
    return torch.Generator().manual_seed((subject.seed * 1009 + kind) * 1009 + sample.position)


def form_of(sample: Sample) -> tuple[Any, ...]:
    """What tells variations apart: shapes, and values that are no tensors."""
    return tuple(
        (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else repr(value)
        for value in sample.flat
    )


def _too_large(sample: Sample, of: Sample) -> bool:
    return sample.elements > max(MOST_ELEMENTS, of.elements)


def refusal(subject: Subject, sample: Sample, change: Change) -> str | Unserved | None:
    """Why a variation is no input of the operator, as its reference says in float64; None where it is one."""
    for dtype in (torch.float64, None):  # a class may take the dtype that its author gave, and no other
        try:
            before, known = _warned(subject, change.of, dtype)
        except Exception as error:
            refuse_own(error)
            continue  # the properties report what the author's own sample raises
        try:
            after, warned = _warned(subject, sample, dtype)
        except Exception as error:
            refuse_own(error)
            fault = unserved(subject, change, sample, error, dtype)
            return fault or f"{type(error).__name__}: {first_line(error)}"
        results = [each for each in after if isinstance(each, Tensor)]
        if sum(each.numel() for each in results) > MOST_RESULTS:
            return f"its results have more than {MOST_RESULTS} elements"
        if all_finite(before) and not all_finite(after):
            return "its results are not finite"
        return next((f"it warns: {text}" for text in warned if text not in known), None)
    return "the reference does not take the sample itself"


def _warned(subject: Subject, sample: Sample, dtype: torch.dtype | None) -> tuple[Sequence[Any], list[str]]:
    """The results of the reference, and of what it warns."""
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = subject.reference(sample, sample.at(dtype))
    return results, [str(each.message).splitlines()[0] for each in caught]
