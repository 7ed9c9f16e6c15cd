"""Comparison of a tensor with the right tensor, and its verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from opsmith.judging.answer import Answer, Combination, Half
from opsmith.judging.compare import (
    Difference,
    all_close,
    exact_difference,
    is_close,
    is_same,
    within_rounding,
    worst_difference,
)
from opsmith.judging.tensors import is_inexact


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison.

    Args:
        kind: `equal`; `rounding` if a term of the bound explains every difference; `undecided` if the right
            values of the elements that differ are unknown; or `wrong`.
        term: The last term of the bound that was measured.
        difference: The worst element, if it is wrong.
        minor: True if a wrong tensor is right to half of the dtype's digits.
    """

    kind: Literal["equal", "rounding", "undecided", "wrong"]
    term: str = ""
    difference: Difference | None = None
    minor: bool = False

    @property
    def wrong(self) -> bool:
        """True if no term of the bound explains the difference."""
        return self.kind == "wrong"

    def __str__(self) -> str:
        return str(self.difference or self.kind)


def judge(got: Tensor, right: Answer | Combination) -> Verdict:
    """Compare a tensor with the right tensor of the same shape.

    Integers must equal the results in one of the two precisions, since rounding may change an `argmax`.

    Example:
        >>> from opsmith.judging.answer import Computation
        >>> x = torch.tensor([0.5, 1.0])
        >>> exp = Computation.of(lambda flat: [flat[0].exp()], [x], torch.Generator()).at([x], torch.float32)
        >>> [str(judge(each, exp[0])) for each in (x.exp(), x.exp() + 1e-3)]
        ['rounding', 'at [0] it is 1.64972 where 1.64872 is right; 2 of 2 elements are wrong']
    """
    value = right.value
    assert value is not None
    actual = got.detach().cpu()
    if not is_inexact(value):
        assert isinstance(right, Answer)
        assert right.ordinary is not None
        difference = exact_difference(actual, right.ordinary.cpu(), value)
        return Verdict("equal") if difference is None else Verdict("wrong", difference=difference)
    wide = actual.to(value.dtype)
    if wide.shape == value.shape and torch.equal(wide, value):
        return Verdict("equal")
    bound = None
    for bound in right.bounds():
        if all_close(wide, value, bound.distance):
            return Verdict("rounding", bound.term)
    assert bound is not None
    judged = right.judged()
    difference = worst_difference(actual, value, bound.unit, bound.allowed, judged)
    if difference is not None:
        return Verdict("wrong", bound.term, difference, within_rounding(actual, value.to(actual.dtype)))
    everywhere = worst_difference(actual, value, bound.unit, bound.allowed)
    return Verdict("rounding" if everywhere is None else "undecided", bound.term)


def wrong_elements(got: Tensor, right: Answer | Half) -> Tensor:
    """Mark the elements of a floating tensor of the right shape that no term of the bound explains."""
    value = right.value
    assert value is not None
    wide = got.detach().cpu().to(value.dtype)
    wrong = ~is_same(wide, value)
    if not wrong.any():
        return wrong  # the usual case; bounds take longer
    for bound in right.bounds():
        wrong &= ~is_close(wide, value, bound.distance)
        if not wrong.any():
            return wrong
    judged = right.judged()
    return wrong if judged is None else wrong & judged
