"""The right one times a factor, and what that factor equals."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from opsmith.checking.diagnosis.factors import CLOSE, named_factors, shown_factor
from opsmith.checking.diagnosis.found import Found
from opsmith.checking.diagnosis.pair import Pair
from opsmith.checking.diagnosis.seen import Seen

FEW = 3
"""Of fewer numbers each is a multiple of the other: only a factor that stays, or has a name, is evidence."""


def scale(seen: Seen) -> Iterator[Found]:
    """A factor: the same on all inputs; or one that is another, and has a name, or fits many numbers."""
    factor = factor_of(seen.first)
    if factor is None or abs(factor - 1) < 1e-6 or abs(factor + 1) < 1e-6:
        return
    fresh = [factor_of(pair) for pair in seen.fresh]
    factors = [factor, *(each for each in fresh if each is not None)]
    if len(factors) != len(seen.pairs):
        return
    steady = all(near(each, factor) for each in factors)
    got = seen.observation.got
    close = max(CLOSE, 16 * torch.finfo(got.dtype).eps) if got is not None else CLOSE
    if seen.observation.tolerance is not None:
        close = max(close, 1e-4)  # finite differences tell no more
    names = named_factors(seen, factors, close)
    shown = shown_factor(factor, close)
    few = min(int(pair.right.nan_to_num(0.0, 0.0, 0.0).count_nonzero()) for pair in seen.pairs) < FEW
    if few and not (seen.fresh and (names or steady)) and not _whole(shown):
        return
    evidence = {"factor": factor.real if factor.imag == 0 else factor}
    if names:
        words = [name for name in names if name != shown]
        equals = " or ".join(words)
        reason = f"it is the right one times {shown}" + (f", which is {equals}" if words else "")
        yield Found("scale", reason, {**evidence, "equals": " or ".join(names)})
    elif steady:
        yield Found("scale", f"it is the right one times {shown}", {**evidence, "equals": shown})
    else:
        every = ", ".join(shown_factor(each, close) for each in factors)
        reason = f"it is the right one times a factor that depends on the inputs ({every} on fresh ones)"
        yield Found("scale", reason, {**evidence, "factors": every}, weak=True)


def _whole(shown: str) -> bool:
    """Whether a factor is a whole number, or one over it."""
    return shown.lstrip("-").removeprefix("1/").isdigit()


def factor_of(pair: Pair) -> complex | None:
    """The factor between a pair's tensors; None if there is none that explains all."""
    if not pair.same_shape:
        return None
    told = pair.right.isfinite()  # differences do not tell every element
    right, mine = pair.right[told], pair.mine[told]
    weight = float((right.abs() ** 2).sum())
    if not weight or not mine.any():
        return None
    factor = complex((right.conj() * mine).sum() / weight)
    if not pair.right.is_complex() or abs(factor.imag) < 1e-9 * abs(factor):
        factor = complex(factor.real)
    return factor if pair.is_(pair.right * (factor if factor.imag else factor.real)) else None


def near(one: complex, other: complex) -> bool:
    """Whether two factors are the same, but for rounding."""
    return abs(one - other) <= 1e-6 * max(abs(one), abs(other))
