"""The corpus exported: the program keeps one node, the operator's own, and gives the same values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adopted_corpus import adopted, by_opsmith, chosen, run
from corpus import Entry, structure, tensors
from torch import Tensor

pytestmark = pytest.mark.compile


class Calling(torch.nn.Module):
    """A model that calls an operator: the tensors are its inputs, the rest it knows."""

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        self.operator, self.arguments = adopted(entry), entry.make()[0]

    def forward(self, *given: Tensor) -> Any:
        rest = iter(given)
        return self.operator(*(next(rest) if isinstance(a, Tensor) else a for a in self.arguments))


def inputs(entry: Entry) -> tuple[Tensor, ...]:
    return tuple(argument for argument in entry.make()[0] if isinstance(argument, Tensor))


def _compare(entry: Entry) -> None:
    program = torch.export.export(Calling(entry), inputs(entry))
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert called.count(f"corpus.{entry.name}.default") == 1, called
    found, expected = run(program.module(), inputs(entry)), run(entry.apply, entry.make()[0])
    assert structure(found) == structure(expected)
    torch.testing.assert_close(list(tensors(found)), list(tensors(expected)), rtol=0, atol=0)


@pytest.mark.every(8)
@chosen(lambda entry: entry.exports)
def test_exported(entry: Entry) -> None:
    _compare(entry)


@chosen(lambda entry: not entry.exports and "export" not in entry.refused)
def test_right_or_refused(entry: Entry) -> None:
    """A program cannot hold a callable or a module as an argument: it is inlined or refused by us."""
    try:
        _compare(entry)
    except Exception as error:
        if not by_opsmith(error):
            raise
