"""The register of Function classes that are wrong in what they touch or keep, and of right ones."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function

Build = Callable[[], tuple[Any, Any]]
"""Makes a class anew, and samples to check it on; None where it is an operator that has its own."""


@dataclass(frozen=True)
class Mutant:
    """A class with one fault.

    Args:
        build: Makes it.
        property: The property that must find it.
        cause: The word for it.
        input: The argument or result at fault.
        says: Words of the message.
        also: Other causes that its other failures may have.
    """

    build: Build
    property: str
    cause: str
    input: str | None
    says: str
    also: frozenset[str]


MUTANTS: dict[str, Mutant] = {}
TWINS: dict[str, Build] = {}


def mutant(check: str, cause: str, input: str | None, says: str, *also: str) -> Callable[[Build], Build]:
    """A class that `check` must find wrong by this property, for this cause, in these words."""

    def enter(build: Build) -> Build:
        assert build.__name__ not in MUTANTS, build.__name__
        MUTANTS[build.__name__] = Mutant(build, check, cause, input, says, frozenset(also))
        return build

    return enter


def twin(build: Build) -> Build:
    """A class that does nearly the same, and is right."""
    assert build.__name__ not in TWINS, build.__name__
    TWINS[build.__name__] = build
    return build


def matrix() -> list[Any]:
    return [(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),)]


class Twice(Function):
    """The right one, of which all others are versions."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * grad * x
