"""Fixtures for tests of messages: a name for an operator, the location of a function, the comparison."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from opsmith import errors

Says = Callable[[type[errors.OpsmithError], str], AbstractContextManager[None]]


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses."""
    return f"messages::{re.sub(r'[^0-9a-zA-Z]+', '_', request.node.name).strip('_')}"


@pytest.fixture
def place() -> Callable[[Callable[..., Any]], str]:
    """Source location of a function, found independently of opsmith."""

    def of(function: Callable[..., Any]) -> str:
        return f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"

    return of


@pytest.fixture
def says() -> Says:
    """A region that must raise exactly this class with exactly this message."""

    @contextmanager
    def region(kind: type[errors.OpsmithError], message: str) -> Iterator[None]:
        with pytest.raises(errors.OpsmithError) as caught:
            yield
        assert caught.value.message() == textwrap.dedent(message).strip()
        assert type(caught.value) is kind

    return region
