"""What a page says, as plain values: what looks at an operator makes them, templates only read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from opsmith import errors
from opsmith.checking import Report
from opsmith.drawing import Figure
from opsmith.pages.aspects import Aspect
from opsmith.pages.benchmarks import Measured
from opsmith.pages.exports import Exported
from opsmith.pages.kernels import Kernels
from opsmith.pages.memory import Kept
from opsmith.pages.signature import Signature
from opsmith.pages.sources import Code

T = TypeVar("T")


@dataclass(frozen=True)
class Absent:
    """A section that is not there.

    Args:
        reason: Why, and what to do about it.
    """

    reason: str


@dataclass(frozen=True)
class Content:
    """All that the page of one operator says.

    Args:
        name: `namespace::name`.
        where: `file:line` of the reference.
        signature: How it is called.
        codes: What its author wrote: the reference, formulas, samples.
        aspects: What is handwritten and what is derived.
        report: What a check found.
        graph: The graph of its reference and formulas.
        kept: What a call keeps for the backward.
        kernels: Its kernels, and what they take.
        exports: What became of it in ONNX, in each kind of body.
        measured: How fast it is.
        environment: What all of this was seen with.
    """

    name: str
    where: str
    signature: Signature
    codes: tuple[Code, ...]
    aspects: tuple[Aspect, ...]
    report: Report | Absent
    graph: Figure | Absent
    kept: Kept | Absent
    kernels: Kernels | Absent
    exports: tuple[Exported, ...] | Absent
    measured: Measured | Absent
    environment: Mapping[str, str]


def attempted(make: Callable[[], T]) -> T | Absent:
    """What a section holds, or why there is none: what an operator raises ends a section, and not the page.

    Example:
        >>> attempted(lambda: [1.0][0]), attempted(lambda: [][0])
        (1.0, Absent(reason='IndexError: list index out of range'))
    """
    try:
        return make()
    except errors.OpsmithError as error:
        return Absent(str(error))
    except Exception as error:
        return Absent(f"{type(error).__name__}: {error}".rstrip(": "))
