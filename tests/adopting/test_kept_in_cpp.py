"""What a known call of a class keeps for its backward, looked at in C++, is what Python keeps."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from opsmith.torch_library import capabilities
from opsmith.torch_library.autocast import autocast_in_force
from opsmith.torch_library.origins.class_nodes import ClassNodes
from opsmith.torch_library.origins.context import NUMBERS_AND_NAMES

A, B, COMPUTED, OTHER, RESULT = (torch.ones(2) for _ in range(5))
WHOLE, PARAMETER = torch.arange(2), torch.nn.Parameter(torch.ones(1))
TENSORS = [A, B, COMPUTED, OTHER, RESULT, WHOLE, None]
PLAIN = [A, COMPUTED, WHOLE, RESULT, 3, "mean", None, torch.float32]
ANY = [*PLAIN, PARAMETER, (1, 2), [A], {"key": 1}, object()]
VALUES = (A, 3, B, "mean", None)


def tensors(kept: tuple[Any, ...]) -> tuple[Any, ...]:
    """What is kept, with the tensors in place of their positions."""
    saved, own, attributes, *more = kept
    if more:
        more[0] = [id(saved[at]) for at in more[0]]
    return [*map(id, saved)], own, [(name, id(saved[at])) for name, at in attributes], more


@pytest.mark.skipif(not capabilities.on("calls_in_cpp"), reason="calls in C++ are off")
@pytest.mark.parametrize("always", [None, True, False])
def test_the_same_is_kept(always: bool | None) -> None:
    extension = capabilities.calls_in_cpp()
    if extension is None:
        pytest.skip("calls in C++ are not built")
    draw = random.Random(0)
    strays = [1, 3, 4]
    in_cpp = extension.keeper(always, strays, NUMBERS_AND_NAMES, autocast_in_force)
    nodes: Any = SimpleNamespace(_adopted=SimpleNamespace(facts=SimpleNamespace(hides=False)))
    looked = 0
    for _ in range(2000):
        own = tuple(draw.choices(TENSORS, k=draw.randrange(4)))
        kinds = draw.choice([PLAIN, ANY])
        attributes = {f"name{at}": draw.choice(kinds) for at in range(draw.randrange(4))}
        results = draw.choice([(RESULT,), (RESULT, OTHER)])
        here, there = {**attributes}, {**attributes}
        kept = in_cpp(here, own, [A, B], results, VALUES)
        expected = ClassNodes._kept(nodes, always, strays, there, own, [A, B], results, VALUES)
        if kept is None:  # Python looks at what has another type
            assert [*map(id, here.values())] == [*map(id, attributes.values())]
            assert any(value is each for value in attributes.values() for each in ANY[len(PLAIN) :])
        else:
            looked += 1
            assert expected is not None
            assert [*here] == [*there]
            assert tensors(kept) == tensors(expected)
    assert looked > 1000
