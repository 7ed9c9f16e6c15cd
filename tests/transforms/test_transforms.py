"""One declaration under every transform: the answer is that of the plain function, to any order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transform_cases import DEPTH_THREE, SUBJECTS, TRANSFORMS, Call
from transform_subjects import Subject

DEEPLY_NESTED = [subject for subject in SUBJECTS if subject.name in ("formulas", "hidden", "opaque")]


def _compare(subject: Subject, transform: Callable[[Call], Any]) -> None:
    single, batched = subject.inputs(), subject.inputs(batch=True)
    expected = transform(Call(subject.plain, single, batched))
    torch.testing.assert_close(transform(Call(subject.operator, single, batched)), expected)


# torch.func.linearize builds its own graph in a way that torch.fx warns about, for aten operators too.
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
@pytest.mark.parametrize(
    ("subject", "transform"),
    [
        pytest.param(subject, transform, id=f"{subject.name}-{transform}")
        for subject, transform in itertools.product(SUBJECTS, TRANSFORMS)
        # No single out_dims fits its results, of which one has a dimension less.
        if (subject.name, transform) != ("list-and-two-results", "vmap-last-dim")
    ],
)
def test_transform(subject: Subject, transform: str) -> None:
    _compare(subject, TRANSFORMS[transform])


@pytest.mark.parametrize("nesting", DEPTH_THREE)
@pytest.mark.parametrize(
    "subject",
    [s for s in SUBJECTS if s.name in ("formulas", "hidden", "opaque")],
    ids=lambda subject: subject.name,
)
def test_nesting_of_three(subject: Subject, nesting: str) -> None:
    _compare(subject, DEPTH_THREE[nesting])
