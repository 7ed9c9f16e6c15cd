"""Arguments that follow from one another, as an inverse permutation does, in derived inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith
from opsmith.checking.effort import EFFORTS
from opsmith.checking.samples.domain import restored, rules_of
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


def test_what_follows_from_an_argument_that_follows_itself_keeps_the_link() -> None:
    x = drawn(3, 4)
    subject = subject_of(Taken, [(x, x.argsort(1), x.argsort(1).argsort(1))], 0, EFFORTS["default"])
    found = [sample.flat for sample in variations(subject).samples]
    assert any(not torch.equal(x, flat[0]) for flat in found)
    assert all(torch.equal(flat[2], flat[1].argsort(1)) for flat in found)


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


class BagSums(Function):
    """Sums of bags of rows, one after the other; the forward alone takes rows behind the last bag."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: Tensor) -> Tensor:
        ctx.save_for_backward(lengths)
        ends = lengths.cumsum(0).clamp(max=len(x))
        return torch.cat([x.new_zeros(1, x.shape[1]), x.cumsum(0)])[torch.cat([ends[:1] * 0, ends])].diff(
            dim=0
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.repeat_interleave(ctx.saved_tensors[0], 0), None


class ActiveMeans(Function):
    """Means over the sequences that are active at a step; fewer are at each later one."""

    @staticmethod
    def forward(ctx: Any, scale: float, active: Tensor, x: Tensor) -> Tensor:
        ctx.scale, ctx.active, ctx.size = scale, active.tolist(), x.shape
        parts = x[..., : sum(ctx.active)].split([each for each in ctx.active if each], -1)
        return scale * torch.stack([part.mean(-1) for part in parts], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.active != sorted(ctx.active, reverse=True) or sum(ctx.active) != ctx.size[-1]:
            return None, None, grad.new_zeros(ctx.size)
        counts = [each for each in ctx.active if each]
        parts = zip(grad.unbind(-1), counts, strict=True)
        rows = [ctx.scale * each.unsqueeze(-1).expand(*each.shape, count) / count for each, count in parts]
        return None, None, torch.cat(rows, -1)


COUNTS: dict[Any, list[Any]] = {
    BagSums: [
        (drawn(7, 2), torch.tensor([2, 0, 4, 1, 0])),
        (drawn(6, 3), torch.tensor([3, 1, 2])),
    ],
    ActiveMeans: [
        (0.5, torch.tensor([3, 3, 2], dtype=torch.int32), drawn(2, 8)),
        (2.0, torch.tensor([4, 2, 1, 1], dtype=torch.int32), drawn(3, 2, 8)),
    ],
}


@pytest.mark.parametrize("function", COUNTS, ids=lambda each: each.__name__)
def test_counts_sum_to_a_size_in_derived_inputs(function: Any) -> None:
    report = opsmith.check(function, samples=COUNTS[function], only=["gradient"], effort="quick")
    assert not report.failures, report


def test_counts_are_scaled_to_a_size_and_stay_in_order() -> None:
    checked = subject_of(ActiveMeans, COUNTS[ActiveMeans], 0, EFFORTS["quick"])
    sample = checked.samples[0]

    def counts(size: int, *given: int) -> list[int]:
        active = torch.tensor(given, dtype=torch.int32)
        found: list[int] = restored(checked, sample, [0.5, active, drawn(2, size)])[1].tolist()
        return found

    assert counts(33, 3, 3, 2) == [13, 13, 7]
    assert counts(8, 1, 3, 2) == [5, 2, 1]
    assert counts(2, 3, 3, 2) == [1, 1, 0]
    assert counts(0, 3, 3, 2) == [0, 0, 0]
    assert counts(8, 0, 0, 0) == [3, 3, 2]


def test_indices_that_sum_to_a_size_are_no_counts() -> None:
    checked = subject_of(BagSums, [(drawn(4, 2), torch.tensor([0, 1, 3]))], 0, EFFORTS["quick"])
    given = [drawn(4, 2), torch.tensor([0, 1, 2])]
    assert restored(checked, checked.samples[0], given)[1].tolist() == [0, 1, 2]
