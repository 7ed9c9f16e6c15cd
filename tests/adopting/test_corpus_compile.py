"""The corpus in compiled code: one whole graph, with the values and gradients of cls.apply."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from adopted_corpus import (
    adopted,
    by_opsmith,
    chosen,
    followed,
    gradients,
    incoming,
    run,
    sample,
)
from corpus import ENTRIES, Entry, structure, tensors
from faults_of_torch import fault

pytestmark = pytest.mark.compile


@pytest.fixture(autouse=True)
def _objects(request: pytest.FixtureRequest) -> None:
    """Objects other than tensors break the graph in one version of torch."""
    entry = request.node.callspec.params.get("entry")
    reason = fault("object_argument") if isinstance(entry, Entry) and entry.name in OBJECTS else None
    if reason is not None:
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))


OBJECTS = ("elementwise", "checkpoint", "through_frozen")
"""Entries that are given a function or a module."""


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Each test compiles for itself: torch gives up on a function that it has compiled eight times."""
    yield
    torch.compiler.reset()


def _compare(entry: Entry, backend: str) -> None:
    operator = adopted(entry)
    step = torch.compile(lambda *given: operator(*given), backend=backend, fullgraph=True, dynamic=False)
    arguments, others = sample(entry, 0), sample(entry, 0)
    found, expected = run(step, arguments), run(entry.apply, others)
    assert structure(found) == structure(expected)
    assert [t.requires_grad for t in tensors(found)] == [t.requires_grad for t in tensors(expected)]
    torch.testing.assert_close(list(tensors(found)), list(tensors(expected)))
    if followed(expected):
        grads = incoming(followed(expected))
        torch.testing.assert_close(
            gradients(followed(found), arguments, grads), gradients(followed(expected), others, grads)
        )


@chosen(lambda entry: entry.compiles, every=4)
@pytest.mark.every(12)
def test_compiled(entry: Entry) -> None:
    _compare(entry, "aot_eager")


@pytest.mark.parametrize("name", ["numpy_backward"])
def test_a_backward_whose_own_fallback_meets_the_same_obstacle(name: str) -> None:
    _compare(ENTRIES[name], "aot_eager")


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.slow) for each in ("linear", "layer_norm", "top_k")],
)
def test_compiled_by_inductor(name: str) -> None:
    _compare(ENTRIES[name], "inductor")


@chosen(lambda entry: not entry.compiles and "compile" not in entry.refused)
def test_right_or_refused(entry: Entry) -> None:
    """Not promised, for torch may not trace them: but never a wrong answer, nor only an error of torch."""
    try:
        _compare(entry, "aot_eager")
    except Exception as error:
        if not by_opsmith(error):
            raise
