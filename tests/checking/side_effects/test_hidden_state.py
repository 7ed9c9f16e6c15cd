"""Hidden state of an operator: found, put away and put back."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from opsmith.checking.side_effects.hidden_state import HiddenState
from opsmith.core.reachable import CONTAINERS, Reached

KEPT: list[Any] = [{"a": 1}, [1], {1}, deque([1])]


def test_every_container_is_tried() -> None:
    assert {type(value) for value in KEPT} == set(CONTAINERS)


@pytest.mark.parametrize("value", KEPT, ids=lambda value: type(value).__name__)
def test_what_a_container_holds_is_named_put_away_and_put_back(value: Any) -> None:
    memory = HiddenState((Reached("`cache`", value),))
    before = value.copy()
    assert memory.filled() == ["`cache`"]
    with memory.away():
        assert not value
        assert memory.filled() == []
    assert value == before
