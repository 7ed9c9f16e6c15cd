"""Under autocast, results have the dtypes that are promised, and forward and backward fit together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import called
from opsmith.checking.causes import UNKNOWN
from opsmith.checking.exceptions import refuse_own
from opsmith.checking.numerics.autodiff import dense, vjp
from opsmith.checking.numerics.compare import Difference, form_fault
from opsmith.checking.properties.numeric.differentiable import differentiated, rule_place
from opsmith.checking.properties.torch.casting import (
    WIDE,
    Casting,
    Rounded,
    claims_autocast,
    equal,
    floating,
    representable,
    state,
)
from opsmith.checking.property import (
    Findings,
    Note,
    Property,
    Skipped,
    each_sample,
    first_line,
)
from opsmith.checking.report import Failure
from opsmith.checking.samples.cases import short
from opsmith.checking.samples.sample import Sample, replica
from opsmith.checking.side_effects.global_settings import quiet
from opsmith.checking.subject import Subject

NAME = "autocast"
DTYPES = (torch.bfloat16, torch.float16)
MOST = {"quick": 1, "default": 3, "thorough": 60}
"""How many samples are run, at most."""


@dataclass
class Seen:
    """What one run has found so far.

    Args:
        ran: Whether anything ran under autocast.
        refused: What was refused, and why.
    """

    ran: bool = False
    refused: dict[str, None] = field(default_factory=dict)


def run(subject: Subject) -> Findings:
    """Run every sample in float32 under autocast, and its backward outside."""
    seen = Seen()
    failed = False
    for finding in each_sample(NAME, subject, partial(_sample, seen=seen)):
        failed = failed or isinstance(finding, Failure)
        yield finding
    if seen.ran or failed:
        yield from (Note(reason) for reason in seen.refused)
    else:
        yield Skipped("; ".join(seen.refused) or "no sample has a floating tensor, which autocast casts")


def _sample(subject: Subject, sample: Sample, seen: Seen) -> Findings:
    first = not sample.position
    if not sample.inexact or sample.position >= MOST[subject.effort.name]:
        return
    for device in subject.devices:
        for dtype in DTYPES if subject.effort.name == "thorough" else DTYPES[:1]:
            casting = Casting(subject, sample, device, dtype)
            try:
                subject.call(sample, sample.at(WIDE, device))
            except Exception as error:
                refuse_own(error)
                seen.refused[f"it does not run in float32: {first_line(error)}"] = None
                continue
            yield from _cast(casting, seen)
            if first and seen.ran and dtype == DTYPES[0]:
                yield from _mixed(casting, seen)


def _cast(casting: Casting, seen: Seen) -> Findings:
    """One forward under autocast, and its backward outside of it."""
    subject, sample, kind = casting.subject, casting.sample, casting.device.type
    places = differentiated(subject, sample).places
    outside = state(kind)
    try:
        with quiet(), casting.region():
            inside = state(kind)
            leaves, results = called(casting.call, sample.at(WIDE, casting.device), places)
            yield from _leaked(casting, inside, state(kind), "a call")
    except Exception as error:
        refuse_own(error)
        yield from _restored(casting, outside)
        seen.refused[f"under autocast it raises {type(error).__name__}: {first_line(error)}"] = None
        return
    seen.ran = True
    wrong = [*_results(casting, results, seen)]
    yield from wrong
    open_ = floating(results)
    if wrong or not places or not any(open_):
        return
    yield from _backward(casting, leaves, results, open_, places, seen)
    yield from _restored(casting, outside)


def _results(casting: Casting, results: Sequence[Any], seen: Seen) -> Findings:
    """Hold the results to the dtypes that are promised, and to the rounding of autocast's dtype."""
    subject, sample = casting.subject, casting.sample
    expected = _promised(casting)
    for position, (got, described) in enumerate(zip(results, subject.results(sample), strict=True)):
        right = expected[position] if expected is not None else None
        if not isinstance(got, Tensor) or (right is not None and equal(got, right)):
            continue
        fault = None if right is None else form_fault(got, right, strides=False)
        rule = subject.specification.autocast
        if fault is not None:
            aspect, mine, theirs = fault
            yield Failure(
                NAME,
                described.name,
                aspect if aspect in ("shape", "dtype") else "dtype",
                f"under autocast `{described.name}` has the {aspect} {mine}, and autocast={rule!r} "
                f"promises {theirs}",
                subject.specification.where,
                {"sample": str(casting), "got": mine, "expected": theirs},
            )
            continue
        if not got.is_floating_point() or not subject.has_truth:
            continue
        found = _judged(casting.results, position, got, seen)
        if found is not None:
            yield Failure(
                NAME,
                described.name,
                "kernel-mismatch",
                f"under autocast `{described.name}` is further off than rounding to {short(casting.dtype)} "
                f"explains: {found}",
                subject.specification.where,
                {"sample": str(casting), **found.evidence()},
            )


def _judged(right: Rounded, position: int, got: Tensor, seen: Seen) -> Difference | None:
    """What is wrong with the numbers; None where nothing is, or where nothing can be told."""
    try:
        return right.judge(position, got)
    except Exception as error:
        refuse_own(error)
        words = "the numbers under autocast were left out, for it does not run in float64"
        seen.refused[f"{words}: {first_line(error)}"] = None
        return None


def _promised(casting: Casting) -> list[Any] | None:
    """What a call gives whose arguments are cast as is promised; None where nothing is."""
    if not casting.promised:
        return None
    try:
        return casting.call(casting.cast(casting.sample.at(WIDE, casting.device)))
    except Exception as error:
        refuse_own(error)
        return None  # what it raises is told of the call under autocast


def _backward(
    casting: Casting,
    leaves: Sequence[Any],
    results: Sequence[Any],
    open_: Sequence[bool],
    places: Sequence[int],
    seen: Seen,
) -> Findings:
    subject, sample = casting.subject, casting.sample
    generator = subject.generator()
    grads = [
        representable(each, casting.dtype, generator) if o else None
        for each, o in zip(results, open_, strict=True)
    ]
    plain = [None if grad is None else replica(grad, WIDE) for grad in grads]
    try:
        vjp(casting.call, sample.at(WIDE, casting.device), places, plain)
    except Exception as error:
        refuse_own(error)
        return  # it is wrong without autocast too, as `gradient` tells
    pairs = [(each, grad) for each, grad in zip(results, grads, strict=True) if grad is not None]
    labels = ", ".join(sample.labels[place] for place in places)
    try:
        with quiet():
            found = dense(
                torch.autograd.grad(
                    [each for each, _ in pairs],
                    [leaves[place] for place in places],
                    [grad for _, grad in pairs],
                    allow_unused=True,
                )
            )
    except NotImplementedError as error:
        seen.refused[first_line(error)] = None
        return
    except Exception as error:
        refuse_own(error)
        message = (
            f"after a forward under autocast to {short(casting.dtype)}, the backward raises "
            f"{type(error).__name__}: {first_line(error)}; in float32 it does not. "
        )
        if not claims_autocast(subject):
            hint = "`torch.amp.custom_fwd` and `custom_bwd` over both make them fit"
            seen.refused[message + hint] = None
            return
        cause = "dtype" if re.search(_DTYPE, str(error)) else "raises"
        message += "The dtypes that the forward saves and that come in are not the same there"
        place = rule_place(subject, sample.names[places[0]])
        evidence = {"sample": str(casting), "exception": type(error).__name__}
        yield Failure(NAME, labels, cause, message, place, evidence)
        return
    if not subject.has_truth:
        return
    yield from _gradients(casting, places, plain, found, seen)


_DTYPE = r"dtype|scalar type|BFloat16|Half|data type"
"""How torch says that dtypes do not fit."""


def _gradients(
    casting: Casting,
    places: Sequence[int],
    plain: Sequence[Tensor | None],
    found: Sequence[Tensor | None],
    seen: Seen,
) -> Findings:
    """Hold the gradients to the rounding of autocast's dtype."""
    subject, sample = casting.subject, casting.sample
    bounds = casting.gradients(places, plain)
    for position, (place, got) in enumerate(zip(places, found, strict=True)):
        value = sample.flat[place]
        mine = torch.zeros_like(value, dtype=WIDE) if got is None else got
        difference = _judged(bounds, position, mine, seen) if mine.is_floating_point() else None
        if difference is None:
            continue
        label = sample.labels[place]
        yield Failure(
            NAME,
            label,
            UNKNOWN,
            f"after a forward under autocast, the gradient of `{label}` is further off than rounding to "
            f"{short(casting.dtype)} explains: {difference}",
            rule_place(subject, sample.names[place]),
            {"sample": str(casting), **difference.evidence()},
        )


def _mixed(casting: Casting, seen: Seen) -> Findings:
    """Arguments of several dtypes, as layers under autocast hand them on."""
    subject, sample = casting.subject, casting.sample
    if len(sample.inexact) < 2 or any(sample.flat[place].is_complex() for place in sample.inexact):
        return
    for place in sample.inexact:
        flat = sample.at(WIDE, casting.device)
        flat[place] = replica(flat[place], casting.dtype)
        try:
            with quiet(), torch.no_grad(), casting.region():
                casting.call(flat)
        except Exception as error:
            refuse_own(error)
            label = sample.labels[place]
            words = f"under autocast, with `{label}` alone in {short(casting.dtype)}, it raises "
            message = f"{words}{type(error).__name__}: {first_line(error)}"
            if casting.promised and not isinstance(error, NotImplementedError):
                evidence = {"sample": str(casting), "exception": type(error).__name__}
                yield Failure(NAME, label, "raises", message, subject.specification.where, evidence)
            else:
                seen.refused[message] = None


def _leaked(casting: Casting, before: Any, after: Any, what: str) -> Findings:
    """The state of autocast must be what it was."""
    if before != after:
        yield Failure(
            NAME,
            None,
            "side-effect",
            f"{what} under autocast leaves autocast in another state: on, dtype and cache were {before}, and "
            f"are {after}",
            casting.subject.specification.where,
            {"sample": str(casting)},
        )


def _restored(casting: Casting, before: tuple[bool, torch.dtype, bool]) -> Findings:
    """The same of the state outside, which is set back."""
    kind = casting.device.type
    after = state(kind)
    yield from _leaked(casting, before, after, "a call and its backward")
    if after != before:
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])
        torch.set_autocast_cache_enabled(before[2])


AUTOCAST = Property(NAME, "under autocast, dtypes are as promised, and forward and backward fit", run)
