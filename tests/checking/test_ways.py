"""The driver of ways: one failure for each output that is wrong, with the ways that are wrong and right."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from opsmith.checking.report import Failure
from opsmith.checking.run import TensorName
from opsmith.checking.ways import Fault, Way, compare, differs_from

NAMES = (TensorName("result", "result", "here"), TensorName("x", "gradient", "there"))
RIGHT = (torch.ones(2), torch.zeros(2))


def concluded(fault: Fault) -> Failure:
    return Failure("ways", fault.named.name, "unknown", str(fault), fault.named.where, {})


def way(name: str, outputs: Sequence[Tensor | None] | None, since: int = 0) -> Way:
    return Way(name, NAMES, lambda: outputs, partial(differs_from, RIGHT), concluded, since=since)


def test_each_output_that_is_wrong_is_one_failure() -> None:
    wrong, other = (RIGHT[0], torch.ones(2)), (RIGHT[0], None)
    ways = [way("first", wrong), way("second", RIGHT), way("third", other), way("left out", None)]
    (failure,) = compare(ways)
    assert (failure.input, failure.where) == ("x", "there")
    assert failure.message.startswith("at [0] it is 1 where 0 is right")
    assert dict(failure.evidence) == {"wrong for": "first, third", "right for": "second"}


def test_a_gradient_of_a_wrong_result_is_not_reported() -> None:
    (failure,) = compare([way("first", (torch.zeros(3), torch.ones(2)))])
    assert (failure.input, failure.message) == ("result", "it has the shape [3], where [2] is right")
    assert not [*compare([way("since", (torch.zeros(3), RIGHT[1]), since=1)])]


def refuse() -> None:
    raise ValueError("no")


def test_an_exception_is_a_fault_unless_it_is_excused() -> None:
    fault = partial(differs_from, RIGHT)
    (failure,) = compare([Way("raising", NAMES, refuse, fault, concluded)])
    assert failure.message == "ValueError: no"
    assert not [*compare([Way("excused", NAMES, refuse, fault, concluded, excused=lambda error: True)])]
