"""Indices that a check repeats: a race is a fault where the reference adds, none where it keeps one value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import opsmith

KERNEL = """
template <class T>
__global__ void NAME(Contiguous<const T, 2> rows, Contiguous<const int64_t, 1> slot, int n,
                     Contiguous<T, 2> y) {
  OPSMITH_EACH(i, rows.numel()) {
    const int64_t row = i / rows.size(1), column = i % rows.size(1);
    y(slot[row], column) WRITES rows(row, column);
  }
}
"""


@opsmith.operator("equal_indices::stored")
def stored(rows: Tensor, slot: Tensor, n: int) -> Tensor:
    return rows.new_zeros(n, rows.shape[1]).index_copy(0, slot, rows)


@opsmith.operator("equal_indices::added")
def added(rows: Tensor, slot: Tensor, n: int) -> Tensor:
    return rows.new_zeros(n, rows.shape[1]).index_add(0, slot, rows)


for operator, writes in ((stored, "="), (added, "+=")):
    name = operator.name.partition("::")[2]
    text = KERNEL.replace("NAME", name).replace("WRITES", writes)
    operator.kernel(
        "cuda", cuda=text, grid="ceil(rows.numel / 256)", initial={"result": 0}, dtypes=[torch.float64]
    )
    operator.samples(lambda make: [(make(4, 2), torch.tensor([3, 0, 5, 8]), 9)])


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("operator", "causes"), [(stored, []), (added, ["race"])], ids=["keeps one value", "adds up"]
)
def test_a_race_of_indices_that_the_check_repeats(
    operator: opsmith.Operator[..., Tensor], causes: list[str]
) -> None:
    report = opsmith.check(operator, only=["cuda"], effort="quick")
    assert [each.cause for each in report.failures] == causes
    [outcome] = [each for each in report.outcomes if each.property == "cuda"]
    noted = any("The reference keeps one value" in each for each in outcome.notes)
    assert noted is not bool(causes)


def test_equal_indices_in_a_sample_of_the_author_race() -> None:
    report = opsmith.check(
        stored, samples=[(torch.rand(3, 2), torch.tensor([1, 1, 4]), 5)], only=["cuda"], effort="quick"
    )
    assert {each.cause for each in report.failures} == {"race"}
