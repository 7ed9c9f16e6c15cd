"""The entry point of the diagnosis."""

import torch

from opsmith.checking.causes import CAUSES
from opsmith.checking.diagnosis import Observation, diagnose

RIGHT = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_a_diagnosis_needs_no_more_than_two_tensors() -> None:
    found = diagnose(Observation(-RIGHT, RIGHT))
    assert found.cause == "sign"
    assert found.reason


def test_a_cause_is_one_of_the_list() -> None:
    for got in (None, 2 * RIGHT, RIGHT.flip(0), RIGHT + 0.1, RIGHT / 0, RIGHT.mT):
        assert diagnose(Observation(got, RIGHT)).cause in CAUSES


def test_another_shape_is_named_as_such() -> None:
    found = diagnose(Observation(RIGHT.mT, RIGHT))
    assert (found.cause, found.reason) == ("shape", "it has the shape [4, 3], but the right shape is [3, 4]")
