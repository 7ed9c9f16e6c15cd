"""Results of a batch beside those of its examples, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith.ops
from opsmith.checking.effort import EFFORTS
from opsmith.checking.run import Run, TensorName
from opsmith.checking.subject_kinds import subject_of
from opsmith.checking.ways import Examples, compare_outputs


def loop_of(*results: Tensor | None) -> Examples:
    def function(flat: list[Any]) -> Sequence[Tensor | None]:
        return results

    rows = [[torch.ones(2)], [torch.ones(2)]]
    subject = subject_of(opsmith.ops.exp, None, 0, EFFORTS["quick"])
    run = Run(subject, subject.samples[0], "vmap", dtype=torch.float32)
    return Examples(run, rows, (0,), functions=[function])


@pytest.mark.parametrize("got", [torch.zeros(1), torch.ones(2, 3)], ids=["one zero", "several"])
def test_a_tensor_where_none_is_right_is_a_fault_whatever_its_numbers(got: Tensor) -> None:
    fault = loop_of(None).fault(0, got)
    assert str(fault) == "it is a tensor, where None is right"


def test_none_where_a_tensor_is_right_is_a_fault() -> None:
    fault = loop_of(torch.ones(2)).fault(0, None)
    assert str(fault) == "it is None, where a tensor is right"


def test_none_where_none_is_right_is_no_fault() -> None:
    assert loop_of(None).fault(0, None) is None


def test_another_number_of_outputs_is_a_fault() -> None:
    output = TensorName("result", "result", "here")
    loop, form = loop_of(None), "mapped, {} is not what a loop gives"
    (failure,) = compare_outputs(loop.run, form, [output], [None, None], loop.fault, set())
    message = "mapped, `result` is not what a loop gives: it has the count 2, where 1 is right"
    assert (failure.input, failure.message) == ("result", message)


def test_the_bound_of_a_sum_counts_the_arguments_that_are_not_batched() -> None:
    rows = [[torch.ones(5), torch.ones(5)] for _ in range(2)]
    loop = replace(loop_of(), rows=rows, functions=[lambda flat: [flat[0] @ flat[1]]])
    assert loop._computations[0].summands == (10,)
