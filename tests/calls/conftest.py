"""The executor of a cell."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from call_executors import EXECUTORS, Executor


@pytest.fixture
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    """An executor in force; a test is skipped where there is no such way."""
    row = EXECUTORS[request.param]
    if row.missing:
        pytest.skip(row.missing)
    with row.in_force():
        yield row
    if row.compiles:
        torch.compiler.reset()
