"""One declaration under every transform: the answer is that of the plain function, to any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from matrices import diagonal
from transform_cases import DEPTH_THREE, SUBJECTS, TRANSFORMS, Call
from transform_subjects import Subject

DEEPLY_NESTED = [subject for subject in SUBJECTS if subject.name in ("formulas", "hidden", "opaque")]


def _compare(subject: Subject, transform: Callable[[Call], Any]) -> None:
    single, batched = subject.inputs(), subject.inputs(batch=True)
    expected = transform(Call(subject.plain, single, batched))
    torch.testing.assert_close(transform(Call(subject.operator, single, batched)), expected)


# torch.func.linearize builds its own graph in a way that torch.fx warns about, for aten operators too.
@pytest.mark.every(8)
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
@pytest.mark.parametrize(
    ("subject", "transform"),
    [
        case
        for case in diagonal(SUBJECTS, TRANSFORMS, every=3)
        # No single out_dims fits its results, of which one has a dimension less.
        if case.id != "list-and-two-results-vmap-last-dim"
    ],
)
def test_transform(subject: Subject, transform: str) -> None:
    _compare(subject, TRANSFORMS[transform])


@pytest.mark.parametrize(("subject", "nesting"), diagonal(DEEPLY_NESTED, DEPTH_THREE, every=3))
def test_nesting_of_three(subject: Subject, nesting: str) -> None:
    _compare(subject, DEPTH_THREE[nesting])
