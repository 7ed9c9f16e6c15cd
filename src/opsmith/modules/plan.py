"""Plan of a generated class, as one frozen value: its tensors, its constructor and its forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from opsmith.core.expression import Expression
from opsmith.core.operator import Operator
from opsmith.core.schema import Argument


@dataclass(frozen=True)
class OwnedTensor:
    """A parameter or buffer.

    Args:
        name: The operator's argument that it is given for.
        shape: Its dimensions.
        fill: Initialiser, which fills it in place.
        optional: True if a module may be made without it, by a flag of the constructor.
        buffer: True for a buffer.
        persistent: True if a state_dict holds it.
    """

    name: str
    shape: tuple[Expression, ...]
    fill: Callable[[Tensor], Any]
    optional: bool
    buffer: bool
    persistent: bool

    @property
    def layout(self) -> str:
        """Text of its shape, for docstrings."""
        return f"[{', '.join(each.text for each in self.shape)}]"

    @property
    def filling(self) -> str:
        """Text of its initialiser, which is the same in every process."""
        return _shown(self.fill)


def _shown(fill: Any) -> str:
    if inspect.isroutine(fill):
        return fill.__name__
    if isinstance(fill, partial):
        arguments = [*map(repr, fill.args), *(f"{name}={value!r}" for name, value in fill.keywords.items())]
        return f"{_shown(fill.func)}({', '.join(arguments)})"
    return repr(fill)


@dataclass(frozen=True)
class ModulePlan:
    """A class of modules.

    Args:
        operator: The operator that `forward` calls.
        name: Name of the class.
        where: `file:line` of the call of `module`.
        sizes: The constructor's sizes, in order.
        letters: For each letter of the operator's `shapes=` that is a size, its name.
        learnt: Sizes that may be None and are then inferred in the first call.
        owned: Parameters and buffers, in the order in which they are made and filled.
        options: Arguments other than tensors that the constructor takes, in the operator's order.
        forward: Arguments that `forward` takes, in the operator's order.
    """

    operator: Operator[..., Any]
    name: str
    where: str
    sizes: tuple[str, ...]
    letters: dict[str, str]
    learnt: frozenset[str]
    owned: tuple[OwnedTensor, ...]
    options: tuple[Argument, ...]
    forward: tuple[Argument, ...]

    @property
    def flags(self) -> tuple[OwnedTensor, ...]:
        """Parameters and buffers that a module may be made without."""
        return tuple(each for each in self.owned if each.optional)
