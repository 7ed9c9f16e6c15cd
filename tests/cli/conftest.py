"""Files with operators for the command line to check; every operator gets a name of its own."""

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result
from unhurried import lift_limits

from opsmith.cli.app import app

numbers = itertools.count()

OPERATORS = """
import torch, opsmith
from torch import Tensor

@opsmith.operator("{space}::right")
def right(x: Tensor) -> Tensor:
    return x * x

right.gradients(x=lambda grad, x: 2 * grad * x)
right.samples(lambda make: [(make(3),)])

@opsmith.operator("{space}::wrong")
def wrong(x: Tensor) -> Tensor:
    return x * x

wrong.gradients(x=lambda grad, x: -2 * grad * x)
wrong.samples(lambda make: [(make(3),)])
other_name = wrong
"""


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    lift_limits(monkeypatch)


@pytest.fixture
def opsmith() -> Callable[..., Result]:
    """The command line, run in this process."""
    return lambda *arguments: CliRunner().invoke(app, list(arguments), prog_name="opsmith")


@pytest.fixture
def space() -> str:
    """A namespace that no other test uses."""
    return f"cli{next(numbers)}"


@pytest.fixture
def write(tmp_path: Path, space: str) -> Iterator[Callable[..., Path]]:
    """Write a file whose `{space}` becomes the namespace; afterwards nothing of it can be imported."""
    modules, path = set(sys.modules), list(sys.path)

    def write(text: str = OPERATORS, name: str | None = None) -> Path:
        file = tmp_path / (name or f"{space}_ops.py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("{space}", space))
        return file

    yield write
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
