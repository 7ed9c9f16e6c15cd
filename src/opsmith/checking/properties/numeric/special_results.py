"""Results at special values, beside those of the reference in the dtype itself and in float64.

A kernel that is more exact than the reference is right: where the reference overflows on the way, as in the
sum of squares of a norm, its results in float64 are the truth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import computed_in
from opsmith.checking.exceptions import refuse_own
from opsmith.checking.numerics.compare import clearly_agrees, differs
from opsmith.checking.samples.sample import is_inexact, replica
from opsmith.checking.samples.special_values import SpecialCall
from opsmith.checking.side_effects.global_settings import without_warnings

Expected = tuple[Tensor, Tensor]
"""Result of the reference, and its change as the inputs are perturbed."""


def wrong_results(call: SpecialCall, got: Sequence[Any]) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Yield the name of each wrong result, what came, the right one, and a mask of the wrong elements.

    Args:
        call: The call, with special values.
        got: Its results.
    """
    plain = _reference_runs(call, call.dtype, [call.fresh()])
    if plain is None or all(map(partial(_agrees, call), got, plain[0])):
        return  # the reference rejects the arguments, or there is nothing that a perturbation could excuse
    rights = reference_results(call, call.dtype)
    if rights is None:
        return
    results = call.subject.results(call.sample)
    for position, (result, actual, right) in enumerate(zip(results, got, rights, strict=True)):
        if right is None or not is_inexact(actual) or actual.shape != right[0].shape:
            continue
        wrong = _differs(call, actual, right)
        if wrong.any():
            wrong &= ~_overflowed(call, position, actual)
        if wrong.any():
            yield result.name, actual, right[0], wrong


def reference_results(call: SpecialCall, dtype: torch.dtype) -> list[Expected | None] | None:
    """Results of the reference, computed in a dtype; None where it rejects the arguments.

    A result without a place among floating numbers, or whose shape a perturbation changes, is None.
    """
    runs = _reference_runs(call, dtype, [call.fresh(), *call.perturbed_copies()])
    if runs is None:
        return None
    right, *beside = runs
    found: list[Expected | None] = []
    for expected, above, below in zip(right, *beside, strict=True):
        if not is_inexact(expected) or above.shape != expected.shape or below.shape != expected.shape:
            found.append(None)
            continue
        spread = torch.maximum((above - expected).abs(), (below - expected).abs()).nan_to_num(torch.inf)
        found.append((expected, spread))
    return found


def _reference_runs(
    call: SpecialCall, dtype: torch.dtype, arguments: Sequence[Sequence[Any]]
) -> list[list[Tensor]] | None:
    """Results of the reference for several arguments; None where it rejects any."""
    plain = call.subject.plain(call.sample)
    try:
        with torch.no_grad(), without_warnings():
            return [plain([replica(value, dtype) for value in values]) for values in arguments]
    except Exception as error:
        refuse_own(error)
        return None


def _agrees(call: SpecialCall, actual: Any, expected: Any) -> bool:
    """True if a result is right even for a reference that no perturbation changes, or is not compared."""
    if not is_inexact(expected) or not is_inexact(actual) or actual.shape != expected.shape:
        return True
    return clearly_agrees(actual, expected) or not bool(
        _differs(call, actual, (expected, torch.zeros(()))).any()
    )


def _differs(call: SpecialCall, actual: Tensor, right: Expected) -> Tensor:
    expected, _ = right
    given = call.flat[call.argnum]
    wrong = differing(call, actual, right, hold_nan=not bool(given.isfinite().all()))
    if given.isnan().any():  # nan may spread further than in the reference, but not be hidden
        wrong &= expected.isnan()
    return wrong


def differing(call: SpecialCall, actual: Tensor, right: Expected, *, hold_nan: bool) -> Tensor:
    """Mark the elements that differ by more than the rounding of the dtype that a call computes in."""
    wrong = differs(actual, *right, hold_nan=hold_nan)
    if call.dtype != torch.float64 or not wrong.any():
        return wrong
    return differs(actual, *right, hold_nan=hold_nan, computed_in=computed_in(call.subject, call.sample))


def _overflowed(call: SpecialCall, position: int, actual: Tensor) -> Tensor:
    """Mark the elements that are right although the reference, computed in the dtype itself, gives others.

    It overflows on the way there, and in float64 it does not. Nothing is wider than float64: there the
    reference is no truth at values near overflow at which it overflows in float32.
    """
    nothing, everything = (torch.full(actual.shape, found, dtype=torch.bool) for found in (False, True))
    if not call.subject.has_truth:
        return nothing
    narrow = call.in_float32() if call.dtype == torch.float64 else call
    truths = None if narrow is None else reference_results(narrow, torch.float64)
    truth = None if truths is None else truths[position]
    if narrow is None or truth is None:
        return nothing
    expected, spread = (replica(each, torch.float32) for each in truth)
    if narrow is call:
        return ~_differs(call, actual, (expected, spread)) if expected.shape == actual.shape else nothing
    own = reference_results(narrow, torch.float32)
    alone = None if own is None else own[position]
    if alone is None or alone[0].shape != expected.shape:
        return nothing
    return everything if _differs(narrow, alone[0], (expected, spread)).any() else nothing
