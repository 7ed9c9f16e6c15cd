"""The corpus that proves `check`: operators that are wrong on purpose, and right ones that look suspicious.

A builder makes its operator anew each time, so that no run sees what another one left behind. What it returns
is what a user would hand to `opsmith.check`: an `autograd.Function` class, an operator of ours, or one of
torch.library, with samples where it has none of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Build = Callable[[], tuple[Any, Any]]
"""Returns what is checked, and `samples=` for `check` (None where an operator has its own)."""


@dataclass(frozen=True)
class Planted:
    """An operator with one fault.

    Args:
        name: Its name in the corpus.
        base: The operator that it is a wrong version of, such as `softmax`.
        build: Makes it.
        cause: The word for what is wrong.
        also: Other words that name the fault as truly.
        input: The argument or result at fault; None where no single one is.
        order: 2 where the first order is right and the second is not.
    """

    name: str
    base: str
    build: Build
    cause: str
    also: tuple[str, ...] = ()
    input: str | None = None
    order: int = 1


@dataclass(frozen=True)
class Sound:
    """An operator without any fault.

    Args:
        name: Its name in the corpus.
        build: Makes it.
    """

    name: str
    build: Build


PLANTED: dict[str, Planted] = {}
SOUND: dict[str, Sound] = {}


def planted(
    base: str, cause: str, *, input: str | None = None, also: tuple[str, ...] = (), order: int = 1
) -> Callable[[Build], Build]:
    """Enter an operator with a fault; the function's name is its name."""

    def enter(build: Build) -> Build:
        assert build.__name__ not in PLANTED, build.__name__
        PLANTED[build.__name__] = Planted(build.__name__, base, build, cause, also, input, order)
        return build

    return enter


def sound(build: Build) -> Build:
    """Enter an operator that is right; the function's name is its name."""
    assert build.__name__ not in SOUND, build.__name__
    SOUND[build.__name__] = Sound(build.__name__, build)
    return build
