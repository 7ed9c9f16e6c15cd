"""torch.compile around transforms, and what else people compile: the answer is that of the plain function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled_cases import COMPOSITIONS, compiled
from faults_of_torch import marked
from matrices import diagonal
from transform_cases import SUBJECTS
from transform_subjects import Subject

from opsmith import config

pytestmark = pytest.mark.compile

CHOSEN = {
    subject.name: subject
    for subject in SUBJECTS
    if subject.name in ("formulas", "no-formula", "kernel-no-formula", "hidden", "list-and-two-results")
}


@pytest.fixture(autouse=True)
def _forgotten() -> Any:
    """Each test compiles for itself: torch gives up on a function that it has compiled eight times."""
    yield
    torch.compiler.reset()


def _compare(subject: Subject, composition: str, backend: str, **options: Any) -> None:
    step = COMPOSITIONS[composition]
    found = step(compiled(backend, **options), subject.operator, subject)
    torch.testing.assert_close(found, step(lambda function: function, subject.plain, subject))


@pytest.mark.every(8)
@pytest.mark.parametrize(("name", "composition"), marked(diagonal(CHOSEN, COMPOSITIONS, every=len(CHOSEN))))
def test_composition(name: str, composition: str) -> None:
    _compare(CHOSEN[name], composition, "aot_eager")


def test_hidden_results_in_a_map_of_gradients() -> None:
    """No mode of the trace is left out below `vmap`, where tensors do not show that they are traced."""
    if config.conservative():
        pytest.skip("torch's own transforms do not compile hidden results in a map of gradients")
    _compare(CHOSEN["hidden"], "vmap-grad", "aot_eager")


@pytest.mark.slow
@pytest.mark.every(8)
@pytest.mark.parametrize(("name", "composition"), diagonal(CHOSEN, ["sizes", "vmap-grad"], every=len(CHOSEN)))
def test_dynamic_sizes(name: str, composition: str) -> None:
    _compare(CHOSEN[name], composition, "aot_eager", dynamic=True)


@pytest.mark.parametrize(
    ("name", "composition"),
    [
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (
            ("hidden", "forward-and-backward"),
            ("formulas", "vmap-grad"),
            ("kernel-no-formula", "training"),
        )
    ],
)
def test_inductor(name: str, composition: str) -> None:
    _compare(CHOSEN[name], composition, "inductor")
