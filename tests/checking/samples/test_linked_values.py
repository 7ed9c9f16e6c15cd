"""Arguments that follow from one another, as an inverse permutation does, in derived inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith
from opsmith.checking.effort import EFFORTS
from opsmith.checking.samples.domain import rules_of
from opsmith.checking.samples.variations import variations
from opsmith.checking.subject_kinds import subject_of


class Taken(Function):
    """Elements in an order whose inverse the caller gives, for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return x.take_along_dim(order, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.take_along_dim(ctx.saved_tensors[1], 1), None, None


class TakenAgain(Taken):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.take_along_dim(ctx.saved_tensors[0], 1), None, None  # the order in place of its inverse


class Totals(Function):
    """Sums of segments, which end where `offsets` says; the backward repeats by their lengths."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: Tensor, offsets: Tensor) -> Tensor:
        if int(lengths.min()) < 0 or offsets[0] or offsets[-1] != len(x):
            raise ValueError("lengths and offsets are of other segments")
        ctx.save_for_backward(lengths)
        ends = torch.cat([x.new_zeros(1, x.shape[1]), x.cumsum(0)])[offsets]
        return ends.diff(dim=0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.repeat_interleave(ctx.saved_tensors[0], 0), None, None


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


ORDER = torch.tensor([[2, 0, 1, 3], [1, 2, 3, 0], [0, 3, 1, 2]])
OFFSETS = torch.tensor([0, 2, 3, 6])
CALLS: dict[Any, tuple[Any, ...]] = {
    Taken: (drawn(3, 4), ORDER, ORDER.argsort(1)),
    Totals: (drawn(6, 2), OFFSETS.diff(), OFFSETS),
}


@pytest.mark.slow
@pytest.mark.every(5)
@pytest.mark.parametrize("function", CALLS, ids=lambda each: each.__name__)
def test_a_class_whose_arguments_go_together_passes(function: Any) -> None:
    report = opsmith.check(function, samples=[CALLS[function]], only=["forward", "gradient", "layouts"])
    assert report.passed, report


def test_derived_inputs_keep_the_link() -> None:
    subject = subject_of(Totals, [CALLS[Totals]], 0, EFFORTS["default"])
    found = [sample.flat for sample in variations(subject).samples]
    assert any(not torch.equal(flat[2], OFFSETS) for flat in found)
    assert all(torch.equal(flat[1], flat[2].diff()) for flat in found)


def test_the_order_in_place_of_its_inverse_is_found() -> None:
    (failure,) = opsmith.check(TakenAgain, samples=[CALLS[Taken]], only=["gradient"]).failures
    assert failure.input == "x"


def test_what_one_sample_denies_or_chance_shows_is_no_link() -> None:
    def links(*samples: tuple[Any, ...]) -> int:
        rules = rules_of(subject_of(Taken, samples, 0, EFFORTS["default"]))
        return sum(rule.relation.follows for rule in rules)

    assert links(CALLS[Taken]) == 1
    assert links(CALLS[Taken], (drawn(3, 4), ORDER, ORDER)) == 0
    ordered = torch.arange(4).expand(3, 4)
    assert links((drawn(3, 4), ordered, ordered)) == 0
    swapped = torch.tensor([[1, 0]] * 3)
    assert links((drawn(3, 2), swapped, swapped)) == 0
